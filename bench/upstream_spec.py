"""What drafts gain upstream, in a process of its own: the parts of `bench.device_spec`, which starts this, by `bench.upstream_mtp`.

python -m bench.upstream_spec forced,tiny --device cuda:0 --model MODEL.gguf --record FILE

Every width has contexts of its own, since each keeps as many snapshots as it has drafts. The record is written after each figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from bench.acceptance import PROMPTS
from bench.drafts import (
    AFTER,
    CHANCES,
    TINY_WIDTHS,
    WARM_UP,
    WIDTHS,
    Acceptance,
    Forced,
    Record,
    forced_rates,
    greedy_text,
    prompt_tokens,
)
from bench.head_file import write_head
from bench.upstream_mtp import Model, Setting, Speculation
from pyluce.native import load_libraries
from pyluce.native.devices import parse_device
from pyluce.native.vocabulary import Vocabulary
from pyluce.options import DEFAULT_MODEL
from pyluce.text import Tokenizer

WARM_UP_STEPS = 12
DEFAULT_WIDTH = 4
"""Upstream drafts three tokens unless it is told otherwise."""


class Models:
    """A trunk and its head, and the contexts that they are measured with."""

    def __init__(self, path: Path, gpu: int | None) -> None:
        begun = time.perf_counter()
        self.trunk = Model(path, gpu)
        with tempfile.TemporaryDirectory() as folder:
            head = Path(folder) / "head.gguf"
            write_head(path, head)
            self._head = Model(head, gpu, head=True)
        print(f"  upstream: {path.name} and its head: {time.perf_counter() - begun:.1f} s to load", flush=True)

    @contextmanager
    def engine(self, width: int, setting: Setting) -> Iterator[Speculation]:
        """Contexts of one width."""
        with closing(Speculation(self.trunk, self._head if width > 1 else None, setting, width)) as engine:
            yield engine

    def close(self) -> None:
        """Free both."""
        self._head.close()
        self.trunk.close()


def prefill(a: argparse.Namespace, models: Models) -> Record:
    """Tokens a second of a prompt without and with the head, the first of each not counted."""
    tokens = prompt_tokens(models.trunk.n_vocab, a.prompt)
    record: Record = {}
    for name, width in (("without", 1), ("with", DEFAULT_WIDTH)):
        rates = []
        with models.engine(width, Setting(a.prompt + 64, a.chunk, a.on_host)) as engine:
            for _ in range(a.repetitions + 1):
                engine.clear()
                engine.wait()
                begun = time.perf_counter()
                engine.prefill(tokens)
                engine.wait()
                rates.append(a.prompt / (time.perf_counter() - begun))
        record[name] = rates[1:]
    without, with_head = (statistics.median(record[name]) for name in ("without", "with"))
    record["costs"] = without / with_head - 1
    print(f"  upstream: prefill of {a.prompt}: {without:,.0f} without head, {with_head:,.0f} with", flush=True)
    return record


def forced(a: argparse.Namespace, models: Models, record: Record, save: Saver) -> None:
    """Every width at every chance, after every length; the steps follow the same saved state."""
    n_vocab = models.trunk.n_vocab
    room = max(WIDTHS) * (WARM_UP_STEPS + a.repetitions * a.steps)
    for width in (1, *WIDTHS):
        with models.engine(width, Setting(max(a.after) + room, a.chunk, a.on_host)) as engine:
            for length in a.after:
                rows = record.setdefault(str(length), {})
                engine.clear()
                engine.prefill(prompt_tokens(n_vocab, length))
                saved = engine.save()
                for chance in CHANCES if width > 1 else (0.0,):
                    engine.restore(saved)
                    row = forced_row(engine, n_vocab, chance, a)
                    name = f"{chance} {width}" if width > 1 else "without head"
                    rows[name] = row | {"gain": row["rate"] / rows["without head"]["rate"]} if width > 1 else row
                    print(f"  upstream: after {length}, {name}: {row['rate']:.1f}", flush=True)
                    save()


def forced_row(engine: Speculation, n_vocab: int, chance: float, a: argparse.Namespace) -> Record:
    """One width at one chance. "driver": the share of the time that was spent outside of libllama."""
    draws, token = Forced(chance, n_vocab, WARM_UP), 1
    for _ in range(WARM_UP_STEPS):
        token = engine.step(token, draws.accept)
    before, begun = engine.libllama_seconds, time.perf_counter()
    row = forced_rates(engine, n_vocab, chance, a.repetitions, a.steps)
    inside = engine.libllama_seconds - before
    return row | {"driver": 1 - inside / (time.perf_counter() - begun)}


def tiny(a: argparse.Namespace, models: Models, record: Record, save: Saver) -> None:
    """luce-tiny's greedy text. With drafts it may be another one here: rows are not computed alike in every number."""
    texts: dict[tuple[str, int], list[int]] = {}
    with closing(Vocabulary(DEFAULT_MODEL)) as vocabulary:
        tokenizer = Tokenizer(vocabulary)
        prompts = {kind: [tokenizer.encode_text(text) for text in found] for kind, found in PROMPTS.items()}
    for width in (1, *TINY_WIDTHS):
        with models.engine(width, Setting(1024, 512, a.on_host)) as engine:
            for kind, found in prompts.items():
                row = tiny_row(engine, found, a, texts, kind)
                record[f"{kind}, {f'width {width}' if width > 1 else 'without head'}"] = row
                print(f"  upstream: {kind}, width {width}: {row['rate']:.1f}", flush=True)
                save()


def tiny_row(
    engine: Speculation,
    prompts: Sequence[list[int]],
    a: argparse.Namespace,
    texts: dict[tuple[str, int], list[int]],
    kind: str,
) -> Record:
    """One kind of text at one width; `texts` gets those that are new, and "same texts" counts those that were in it already."""
    rates, counts, same = [], Acceptance(), 0
    engine.steps = engine.tokens = 0
    for _ in range(a.repetitions):
        for number, prompt in enumerate(prompts):
            engine.clear()
            before = engine.tokens
            text, took = greedy_text(engine, engine.prefill(prompt), a.tokens, counts)
            rates.append((engine.tokens - before) / took)
            same += texts.setdefault((kind, number), text) == text
    tokens_a_step = engine.tokens / engine.steps
    row = {"rate": statistics.median(rates), "tokens a step": tokens_a_step, "acceptance": counts.rates()}
    return row | {"same texts": f"{same} of {len(rates)}"}


class Saver:
    """Writes the record as it stands."""

    def __init__(self, path: Path, record: Record) -> None:
        self._path, self._record = path, record

    def __call__(self) -> None:
        self._path.write_text(json.dumps(self._record))


def main() -> None:
    """Run the parts that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", help="prefill, forced or tiny, with commas between")
    parser.add_argument("--device", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=16_384)
    parser.add_argument("--after", type=int, nargs="+", default=AFTER)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--on-host", action="store_true", help="choose the trunk's tokens from logits on the host")
    a = parser.parse_args()
    parts = a.parts.split(",")
    if unknown := set(parts) - {"prefill", "forced", "tiny"}:
        parser.error(f"expected prefill, forced or tiny, found {', '.join(sorted(unknown))}")
    backend, index = parse_device(a.device)
    load_libraries(backend)
    gpu = None if backend == "cpu" else index
    record: Record = {"on host": a.on_host, "chunk": a.chunk}
    save = Saver(a.record, record)
    if "prefill" in parts or "forced" in parts:
        with closing(Models(a.model, gpu)) as models:
            if "prefill" in parts:
                record["prefill"] = prefill(a, models)
                save()
            if "forced" in parts:
                forced(a, models, record.setdefault("forced", {}), save)
    if "tiny" in parts:
        with closing(Models(DEFAULT_MODEL, gpu)) as models:
            tiny(a, models, record.setdefault("tiny", {}), save)


if __name__ == "__main__":
    main()
