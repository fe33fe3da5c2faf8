"""Puts the pieces together: libraries, trunk, vocabulary and engine thread, for one model file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pyluce.engine import BatchCore, Engine, ParkingCore, Resources
from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.keeping import keep_model, lock_cache_dir
from pyluce.luce import LoadedModel, ModelInfo, Progress
from pyluce.memory.experts import route_shape
from pyluce.memory.load import hot_experts, hot_learner, plan_load, runner_options
from pyluce.memory.planner import PlanError
from pyluce.native.sampler import SamplerChain
from pyluce.native.vocabulary import Vocabulary
from pyluce.options import DEFAULT_MODEL, LoadOptions, OptionError
from pyluce.placement.learner import HotLearner
from pyluce.placement.recorder import RouteRecorder
from pyluce.placement.table_file import RoutesError
from pyluce.spec.speculator import Speculator
from pyluce.speculation import Speculation, choose_speculation
from pyluce.state import SequenceState
from pyluce.text import ChatTemplate, Tokenizer
from pyluce.tuning import TuneError
from pyluce.weights import ModelError, open_model


def load_engine(path: Path, options: LoadOptions, progress: Progress | None) -> tuple[Engine, LoadedModel]:
    """Load the model at `path` on a new engine thread.

    Raises OptionError (the state does not fit into memory), ModelError, NativeError, TemplateError, or KeyboardInterrupt when the
    caller was interrupted meanwhile.
    """
    check_model_path(path)
    loaded: list[LoadedModel] = []

    def open_core(check_interrupted: Callable[[], None]) -> ParkingCore[SequenceState]:
        def report(stage: str, done: int, total: int, /) -> None:
            check_interrupted()
            if progress is not None:
                progress(stage, done, total)

        core, model = _open(path, options, report)
        loaded.append(model)
        return core

    return Engine(open_core), loaded[0]


def check_model_path(path: Path) -> None:
    """Raise ModelError when there is no model file at `path`."""
    if path.is_file():
        return
    if path == DEFAULT_MODEL:
        raise ModelError(
            f"the model that belongs to this package is missing: expected {path}; install it again, or name a model"
        )
    raise ModelError(f"{path}: expected a GGUF file, found {'a folder' if path.is_dir() else 'nothing there'}")


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that was just loaded. `warnings` are for the user."""

    runner: TrunkRunner
    n_ctx: int
    budget_bytes: int
    warnings: list[str]
    speculation: Speculation


def open_runner(
    path: Path,
    options: LoadOptions,
    report: Progress,
    routes: RouteRecorder | None = None,
    learner: HotLearner | None = None,
) -> OpenedModel:
    """Load weights and state, sized for the memory that is free now: at the start, and again after a park.

    `routes` counts the picks of experts; `learner`: what hot experts follow, and begin with.

    Raises OptionError, ModelError or NativeError, with nothing left behind.
    """
    with open_model(path, draft=options.draft) as model_file:
        warnings = list(model_file.warnings)
        if options.expert_device is not None and options.device == "cpu" and options.repack:
            options = replace(options, repack=False)
            warnings.append("repack: off, as the expert device has its experts as they are in the file")
        speculation = choose_speculation(model_file, options)
        if speculation.uses_head:
            model_file.attach_draft(embedding=options.device != "cpu")
        try:
            plan = plan_load(model_file, options, speculation)
            hot = learner.hot if learner is not None else hot_experts(model_file, options)
        except (PlanError, RoutesError) as error:
            raise OptionError(str(error)) from error
    warnings += plan.warnings
    try:
        runner = TrunkRunner(path, runner_options(plan, options, hot), report, routes, learner)
    except TuneError as error:
        raise OptionError(f"tune: {error}") from error
    return OpenedModel(runner, plan.request.n_ctx, plan.prefix_cache_bytes, warnings, speculation)


def _open(path: Path, options: LoadOptions, report: Progress) -> tuple[ParkingCore[SequenceState], LoadedModel]:
    with ExitStack() as stack:
        lock = lock_cache_dir(options, stack)
        routes = _open_recorder(path, options, stack)
        learner = _open_learner(path, options)
        opened = open_runner(path, options, report, routes, learner)
        runner, n_ctx, warnings = opened.runner, opened.n_ctx, opened.warnings
        keeper = keep_model(runner, lock, options, partial(_open_again, path, options, routes, learner))
        stack.callback(keeper.close)
        warnings += keeper.warnings
        hparams = runner.hparams
        vocabulary = Vocabulary(runner.model.path)
        stack.callback(vocabulary.close)
        if vocabulary.n_tokens != hparams.n_vocab:
            raise ModelError(
                f"{path}: expected as many tokens in the vocabulary as rows in the output matrix, "
                f"found {vocabulary.n_tokens} and {hparams.n_vocab}"
            )
        if hparams.n_ctx_train and n_ctx > hparams.n_ctx_train:
            warnings.append(f"max_ctx is {n_ctx}, but the model was trained for {hparams.n_ctx_train} tokens")
        tokenizer = Tokenizer(vocabulary)
        template = _template(tokenizer, vocabulary, options)
        info = ModelInfo(
            name=hparams.name or path.stem,
            path=path,
            n_ctx=n_ctx,
            n_ctx_train=hparams.n_ctx_train,
            n_vocab=hparams.n_vocab,
            n_layer=hparams.n_layer,
            size_bytes=runner.model.size_bytes,
            threads=runner.options.n_threads,
            warnings=tuple(warnings),
            chunk=runner.options.chunk_tokens,
            speculation=opened.speculation,
            tuning=runner.tuned.tuning,
        )
        new_chain = partial(SamplerChain, hparams.n_vocab)
        chunk, streams = runner.options.chunk_tokens, runner.options.prompt_streams
        resources = Resources(runner, tokenizer, new_chain, n_ctx, chunk, streams)
        owners = ExitStack()
        core = BatchCore(
            resources,
            owners.close,
            speculator=_speculator(opened.speculation),
            n_slots=options.max_concurrency,
            max_queue=options.max_queue,
            prefill_share=options.prefill_share,
            store=runner.store if opened.budget_bytes else None,
            idle_prefill=options.idle_prefill,
        )
        parking = ParkingCore(
            core, keeper, park_after_s=options.park_after, unpark_on_request=options.unpark_on_request
        )
        owners.enter_context(stack.pop_all())
        return parking, LoadedModel(info, tokenizer, template, keeper.memory_report, parking)


def _speculator(speculation: Speculation) -> Speculator[SequenceState] | None:
    return (
        Speculator(speculation.options, seed=speculation.seed, head_tokens=speculation.head_tokens)
        if speculation.options.enabled
        else None
    )


def _open_recorder(path: Path, options: LoadOptions, stack: ExitStack) -> RouteRecorder | None:
    """What counts picks, closed (and written) by `stack`; None without a file. Raises OptionError when that cannot be used."""
    if options.collect_routing is None:
        return None
    with open_model(path, whole=False) as file:
        shape = route_shape(file.hparams)
    try:
        recorder = RouteRecorder(options.collect_routing, shape)
    except (RoutesError, OSError) as error:
        raise OptionError(f"collect_routing: {error}") from error
    stack.callback(recorder.close)
    return recorder


def _open_learner(path: Path, options: LoadOptions) -> HotLearner | None:
    """What the hot experts follow, as long as the model is served; None unless they are learned. Raises OptionError."""
    with open_model(path, whole=False) as file:
        try:
            return hot_learner(file, options)
        except RoutesError as error:
            raise OptionError(str(error)) from error


def _open_again(
    path: Path,
    options: LoadOptions,
    routes: RouteRecorder | None,
    learner: HotLearner | None,
    before: RunnerOptions,
    report: Progress,
) -> TrunkRunner:
    """The model after a park: with the context and the chunks that its kept states were computed with."""
    same = replace(options, max_ctx=before.n_ctx, chunk=before.chunk_tokens, tune=before.tune)
    return open_runner(path, same, report, routes, learner).runner


def _template(tokenizer: Tokenizer, vocabulary: Vocabulary, options: LoadOptions) -> ChatTemplate | None:
    source = options.chat_template if options.chat_template is not None else vocabulary.chat_template
    return tokenizer.chat_template(source) if source else None
