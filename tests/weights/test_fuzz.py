"""200 damaged files: each is refused with a clear error, in time, in little memory, without a crash."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from pyluce.weights import ModelError, open_model
from tests.weights.conftest import Draft
from tests.weights.header_map import Field, header_fields

SEED = 20240611
N_FILES = 200
MAX_SECONDS = 1.0
MAX_BYTES = 16 << 20

DERIVABLE = ("qwen4exp.full_attention_interval", "qwen4exp.attention.recurrent_layers")
"""Keys that may be missing without a loss."""


@dataclass(frozen=True)
class Original:
    """The undamaged file and where its fields are."""

    draft: Draft
    data: bytes
    fields: list[Field]

    def of_kind(self, *kinds: str) -> list[Field]:
        return [f for f in self.fields if f.kind in kinds]


Damage = Callable[[Original, random.Random, Path], str]


def truncate(original: Original, rng: random.Random, path: Path) -> str:
    header_end = original.fields[-1].offset + original.fields[-1].size
    keep = rng.randrange(header_end) if rng.random() < 0.6 else rng.randrange(header_end, len(original.data))
    path.write_bytes(original.data[:keep])
    return f"truncated to {keep} bytes"


def flip_bits(original: Original, rng: random.Random, path: Path) -> str:
    """One bit of the structure: where a value may as well be meant so (a name, a text, a float), nothing is flipped."""
    last_tensor = original.fields[-1].owner
    field = rng.choice([f for f in original.fields if is_structure(f, last_tensor)])
    bit = rng.randrange(field.size * 8)
    if field.kind in ("value type", "element type") and bit == 0:
        bit = 1  # bit 0 turns unsigned into signed, which says the same
    data = bytearray(original.data)
    data[field.offset + bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"bit {bit} of the {field.kind} of {field.owner!r}"


def is_structure(field: Field, last_tensor: str) -> bool:
    if field.kind == "key":
        return field.owner.startswith("qwen4exp.") and field.owner not in DERIVABLE
    if field.kind == "tensor type":
        return field.owner != last_tensor  # a smaller type at the end of the file only leaves bytes over
    return field.kind not in ("value", "string", "element")


def wrong_count(original: Original, rng: random.Random, path: Path) -> str:
    field = rng.choice([*original.of_kind("tensor count", "key count") * 8, *original.of_kind("element count")])
    old = int.from_bytes(original.data[field.offset : field.offset + 8], "little")
    return overwrite(original, field, rng.choice([old - 1, old + 1, old + 17, 2 * old, 0]), old, rng, path)


def huge_length(original: Original, rng: random.Random, path: Path) -> str:
    kinds = ("key length", "string length", "element length", "tensor name length", "element count", "tensor count")
    kinds += ("key count", "dimension", "tensor offset")
    field = rng.choice(original.of_kind(rng.choice(kinds)))
    huge = rng.choice([2**64 - 1, 2**63, 2**63 - 1, 2**48, 2**32, 2**31, 2**30, 2**24])
    return overwrite(original, field, huge, None, rng, path)


def overwrite(original: Original, field: Field, value: int, same: int | None, rng: random.Random, path: Path) -> str:
    value = rng.randrange(2, 2**62) if value in (same, -1) else value
    data = bytearray(original.data)
    data[field.offset : field.offset + field.size] = (value % 2 ** (8 * field.size)).to_bytes(field.size, "little")
    path.write_bytes(data)
    return f"{field.kind} of {field.owner!r} set to {value}"


def missing_tensor(original: Original, rng: random.Random, path: Path) -> str:
    name = rng.choice([n for n in original.draft.tensors if n != "output.weight"])
    rest = {n: t for n, t in original.draft.tensors.items() if n != name}
    Draft(original.draft.metadata, rest).write(path)
    return f"without {name}"


def extra_tensor(original: Original, rng: random.Random, path: Path) -> str:
    known = rng.choice(list(original.draft.tensors))
    changed = Draft(original.draft.metadata, dict(original.draft.tensors))
    name = rng.choice(
        [known + "2", "x" + known, known.replace("blk.", "blk.1"), f"blk.{rng.randrange(9)}.extra.weight"]
    )
    if name in changed.tensors:
        name = "extra.weight"
    changed.add(name, (64, 2))
    changed.write(path)
    return f"with {name}"


def missing_key(original: Original, rng: random.Random, path: Path) -> str:
    keys = [k for k in original.draft.metadata if k.startswith("qwen4exp.") and k not in DERIVABLE]
    key = rng.choice([*keys, "general.architecture", "tokenizer.ggml.tokens"])
    rest = {k: v for k, v in original.draft.metadata.items() if k != key}
    Draft(rest, original.draft.tensors).write(path)
    return f"without {key}"


def noise(original: Original, rng: random.Random, path: Path) -> str:
    """A run of random bytes somewhere in the header's table of tensors, or a file of noise behind the magic."""
    data = bytearray(original.data)
    start = original.of_kind("tensor name")[0].offset if rng.random() < 0.7 else 4
    end = original.fields[-1].offset
    at, size = rng.randrange(start, end - 64), rng.randrange(16, 64)
    data[at : at + size] = rng.randbytes(size)
    if start == 4:
        data[4:end] = rng.randbytes(end - 4)
    path.write_bytes(data)
    return f"{size} bytes of noise at {at}"


KINDS: list[tuple[Damage, int]] = [
    (truncate, 40),
    (flip_bits, 60),
    (wrong_count, 24),
    (huge_length, 36),
    (missing_tensor, 14),
    (extra_tensor, 10),
    (missing_key, 8),
    (noise, 8),
]


@pytest.fixture(scope="module")
def original(micro_with_mtp: Draft, tmp_path_factory: pytest.TempPathFactory) -> Original:
    path = micro_with_mtp.write(tmp_path_factory.mktemp("fuzz") / "original.gguf")
    return Original(micro_with_mtp, path.read_bytes(), header_fields(path))


def open_measured(path: Path) -> tuple[Exception | None, float, int]:
    """(error, seconds of this process, peak bytes that Python allocated) of opening the file."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    start = time.process_time()
    error: Exception | None = None
    try:
        open_model(path).close()
    except Exception as caught:
        error = caught
    seconds = time.process_time() - start
    return error, seconds, tracemalloc.get_traced_memory()[1] - before


def test_the_undamaged_file_loads(original: Original, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(original.data)
    tracemalloc.start()
    try:
        error, seconds, peak = open_measured(path)
    finally:
        tracemalloc.stop()
    assert error is None and seconds < MAX_SECONDS and peak < MAX_BYTES


def test_200_damaged_files(original: Original, tmp_path: Path) -> None:
    assert sum(count for _, count in KINDS) == N_FILES
    rng = random.Random(SEED)
    process = psutil.Process()
    failures: list[str] = []
    tracemalloc.start()
    try:
        resident = process.memory_info().rss
        open_files = process.num_fds()
        for damage, count in KINDS:
            for i in range(count):
                path = tmp_path / "damaged.gguf"
                what = f"{damage.__name__} {i}: {damage(original, rng, path)}"
                error, seconds, peak = open_measured(path)
                failures += [f"{what}: {problem}" for problem in problems(error, seconds, peak)]
                path.unlink()
        gc.collect()
        assert process.memory_info().rss - resident < 64 << 20
        assert process.num_fds() <= open_files + 1
    finally:
        tracemalloc.stop()
    assert not failures, "\n".join(failures)


def problems(error: Exception | None, seconds: float, peak: int) -> list[str]:
    found = []
    if error is None:
        found.append("loaded without an error")
    elif type(error) is not ModelError:
        found.append(f"expected a ModelError, found {error!r}")
    elif not ("expected" in str(error) and "found" in str(error) and "damaged.gguf" in str(error)):
        found.append(f"an unclear message: {error}")
    elif len(str(error)) > 1000:
        found.append(f"a message of {len(str(error))} characters")
    if seconds > MAX_SECONDS:
        found.append(f"took {seconds:.2f} s")
    if peak > MAX_BYTES:
        found.append(f"took {peak} bytes")
    return found


@pytest.mark.parametrize(
    "kind", ["key length", "string length", "element length", "element count", "tensor name length"]
)
@pytest.mark.parametrize("value", [2**24, 2**30, 2**33])
def test_lengths_that_fit_a_huge_file(original: Original, tmp_path: Path, kind: str, value: int) -> None:
    """A sparse file of 12 GiB has room for what the length says; time and memory must stay bounded all the same."""
    path = tmp_path / "damaged.gguf"
    for field in original.of_kind(kind)[::97][:3]:
        data = bytearray(original.data)
        data[field.offset : field.offset + 8] = value.to_bytes(8, "little")
        path.write_bytes(data)
        with path.open("r+b") as file:
            file.truncate(12 << 30)
        tracemalloc.start()
        try:
            error, seconds, peak = open_measured(path)
        finally:
            tracemalloc.stop()
        assert not problems(error, seconds, min(peak, MAX_BYTES)), f"{field}: {error}, {seconds:.2f} s"
        assert peak < 80 << 20, f"{field}: {peak} bytes"
