"""A `Luce` over the fake runner and the fake vocabulary: everything but the native libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyluce.engine import BatchCore, Engine, Resources
from pyluce.luce import LoadedModel, Luce, ModelInfo
from pyluce.options import LoadOptions
from pyluce.text import Tokenizer
from tests.support.fake_runner import FakeRunner, NumpyChain
from tests.support.fake_vocabulary import FakeVocabulary


def fake_luce(
    options: LoadOptions | None = None, *, vocabulary: FakeVocabulary | None = None, **runner_options: Any
) -> Luce:
    """Load nothing and answer from hashes; `runner_options` are those of FakeRunner."""
    options = options or LoadOptions()
    vocabulary = vocabulary or FakeVocabulary()
    n_ctx = options.max_ctx or 512
    runners: list[FakeRunner] = []

    def open_core(report: Any) -> BatchCore[Any]:
        runner = FakeRunner(vocabulary.n_tokens, n_slots=options.max_concurrency, **runner_options)
        runners.append(runner)
        return BatchCore(
            Resources(runner, tokenizer, NumpyChain, n_ctx, options.chunk),
            runner.close,
            n_slots=options.max_concurrency,
            max_queue=options.max_queue,
            prefill_share=options.prefill_share,
        )

    tokenizer = Tokenizer(vocabulary)
    engine = Engine(open_core)
    source = options.chat_template or vocabulary.chat_template
    info = ModelInfo("fake", Path("fake.gguf"), n_ctx, 4096, vocabulary.n_tokens, 8, 1 << 20, options.threads or 1)
    template = tokenizer.chat_template(source) if source else None
    return Luce(engine, LoadedModel(info, tokenizer, template, lambda: {"calls": len(runners[0].calls)}))
