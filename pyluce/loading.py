"""Puts the pieces together: libraries, trunk, vocabulary and engine thread, for one model file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pyluce.engine import BatchCore, Engine, Resources
from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.keeping import lock_cache_dir, open_cache_dir
from pyluce.luce import LoadedModel, ModelInfo, Progress
from pyluce.native.devices import device_memory
from pyluce.native.sampler import SamplerChain
from pyluce.native.vocabulary import Vocabulary
from pyluce.options import DEFAULT_MAX_CTX, DEFAULT_MODEL, LoadOptions, OptionError, available_cpus
from pyluce.state import SequenceState, StateMemoryError, automatic_budget, check_state_fits
from pyluce.state.memory import available_bytes
from pyluce.text import ChatTemplate, Tokenizer
from pyluce.weights import ModelError, ModelFile, open_model
from pyluce.weights.placement import device_tensors


def load_engine(path: Path, options: LoadOptions, progress: Progress | None) -> tuple[Engine, LoadedModel]:
    """Load the model at `path` on a new engine thread.

    Raises OptionError (the state does not fit into memory), ModelError, NativeError, TemplateError, or KeyboardInterrupt when the
    caller was interrupted meanwhile.
    """
    check_model_path(path)
    loaded: list[LoadedModel] = []

    def open_core(check_interrupted: Callable[[], None]) -> BatchCore[SequenceState]:
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


def choose_context(max_ctx: int | None, n_ctx_train: int) -> int:
    """The context size in tokens: what was asked for, else the default, never more than the model was trained for by default."""
    if max_ctx is not None:
        return max_ctx
    return min(DEFAULT_MAX_CTX, n_ctx_train) if n_ctx_train > 0 else DEFAULT_MAX_CTX


def weight_bytes(model_file: ModelFile, device: str, available: int) -> int:
    """Bytes of the weights on a GPU. Raises OptionError when they are more than `available`."""
    needed = sum(info.nbytes for info in device_tensors(model_file))
    if needed > available:
        raise OptionError(
            f"device: the weights take {needed / 2**30:.2f} GiB, found {available / 2**30:.2f} GiB free on {device}; "
            "choose another device, or a model with smaller weights"
        )
    return needed


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that was just loaded. `warnings` are for the user."""

    runner: TrunkRunner
    n_ctx: int
    budget_bytes: int
    warnings: list[str]


def open_runner(path: Path, options: LoadOptions, report: Progress) -> OpenedModel:
    """Load weights and state, sized for the memory that is free now: at the start, and again after a park.

    Raises OptionError, ModelError or NativeError, with nothing left behind.
    """
    with open_model(path) as model_file:
        n_ctx = choose_context(options.max_ctx, model_file.hparams.n_ctx_train)
        warnings = list(model_file.warnings)
        runner_options = RunnerOptions(
            n_ctx=n_ctx,
            n_slots=options.max_concurrency,
            n_threads=(options.threads or available_cpus()) if options.device == "cpu" else 1,
            kv_type=options.kv_type,
            max_rollback=0,
            chunk_tokens=options.chunk,
            repack=options.repack,
            device=options.device,
        )
        h = model_file.hparams
        if options.device == "cpu":
            available = available_bytes()
        else:
            free, _ = device_memory(options.device)
            available = free - weight_bytes(model_file, options.device, free)
        budget = options.prefix_cache_mib
        if budget is None:
            budget_bytes = automatic_budget(h, runner_options.state(h), available)
        else:
            budget_bytes = budget << 20
        runner_options = replace(runner_options, prefix_cache_bytes=budget_bytes)
        try:
            check_state_fits(h, runner_options.state(h), available)
        except StateMemoryError as error:
            raise OptionError(str(error)) from error
    return OpenedModel(TrunkRunner(path, runner_options, report), n_ctx, budget_bytes, warnings)


def _open(path: Path, options: LoadOptions, report: Progress) -> tuple[BatchCore[SequenceState], LoadedModel]:
    with ExitStack() as stack:
        lock = lock_cache_dir(options, stack)
        opened = open_runner(path, options, report)
        runner, n_ctx, warnings = opened.runner, opened.n_ctx, opened.warnings
        stack.callback(runner.close)
        if lock is not None:
            warnings += open_cache_dir(lock, runner, options, stack).warnings
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
        )
        new_chain = partial(SamplerChain, hparams.n_vocab)
        resources = Resources(runner, tokenizer, new_chain, n_ctx, options.chunk)
        owners = ExitStack()
        core = BatchCore(
            resources,
            owners.close,
            n_slots=options.max_concurrency,
            max_queue=options.max_queue,
            prefill_share=options.prefill_share,
            store=runner.store if opened.budget_bytes else None,
            idle_prefill=options.idle_prefill,
        )
        owners.enter_context(stack.pop_all())
        return core, LoadedModel(info, tokenizer, template, runner.memory_report)


def _template(tokenizer: Tokenizer, vocabulary: Vocabulary, options: LoadOptions) -> ChatTemplate | None:
    source = options.chat_template if options.chat_template is not None else vocabulary.chat_template
    return tokenizer.chat_template(source) if source else None
