"""The header reader by itself: values as written, and a complaint for each way to be wrong."""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES

from pyluce.weights import GgufArray, ModelError, open_model
from pyluce.weights.ggml_types import TYPES, TYPES_BY_NAME
from pyluce.weights.gguf_reader import GgufHeader, read_header
from tools.synth import MICRO, Quantiser, Tensor, Value, model_metadata, model_tensors, write_gguf, write_model
from tools.synth.writer import header_bytes


def read(path: Path) -> GgufHeader:
    with path.open("rb") as file:
        return read_header(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), str(path))


def zeros(name: str, ne: tuple[int, ...] = (32,), type_name: str = "F32") -> Tensor:
    kind = TYPES_BY_NAME[type_name]
    n_bytes = kind.row_bytes(ne[0]) * int(np.prod(ne[1:], dtype=np.int64))
    return Tensor(name, ne, kind.id, lambda: iter([np.zeros(n_bytes, np.uint8)]))


def test_values_as_written(tmp_path: Path) -> None:
    metadata = {
        "u8": Value("u8", 255), "i8": Value("i8", -128), "u16": Value("u16", 65535), "i16": Value("i16", -32768),
        "u32": Value("u32", 2**32 - 1), "i32": Value("i32", -(2**31)), "u64": Value("u64", 2**64 - 1),
        "i64": Value("i64", -(2**63)), "f32": Value("f32", 0.5), "f64": Value("f64", 1e300),
        "yes": Value("bool", True), "no": Value("bool", False), "text": Value("string", "gr\u00fc\u00dfe"),
        "empty": Value("string", ""), "numbers": Value("i16", [1, -2, 3]), "floats": Value("f64", [0.25, 4.0]),
        "flags": Value("bool", [True, False]), "words": Value("string", ["a", "", "\u65e5\u672c"]),
        "nothing": Value("u32", []), "big": Value("u64", [2**64 - 1]),
    }  # fmt: skip
    write_gguf(tmp_path / "m.gguf", metadata, [])
    header = read(tmp_path / "m.gguf")
    assert (header.version, header.alignment, header.tensors) == (3, 32, ())
    for key, value in metadata.items():
        found = header.metadata[key]
        if not isinstance(value.value, list):
            assert found == value.value and type(found) is type(value.value), key
            continue
        assert isinstance(found, GgufArray) and len(found) == len(value.value)
        if value.kind == "string":
            assert list(found.strings()) == value.value
            with pytest.raises(TypeError):
                found.numbers()
        else:
            assert found.numbers().tolist() == value.value
            with pytest.raises(TypeError):
                next(found.strings())


def test_the_same_as_the_gguf_package(tmp_path: Path) -> None:
    """Every tensor at the same place with the same size, and the same vocabulary."""
    path = write_model(tmp_path / "m.gguf", MICRO)[0]
    theirs = GGUFReader(str(path))
    with open_model(path) as model:
        assert len(theirs.tensors) == len(model.tensors)
        for tensor in theirs.tensors:
            ours = model.tensors[tensor.name]
            assert (ours.offset, ours.nbytes) == (int(tensor.data_offset), int(tensor.n_bytes))
            assert (ours.type_id, list(ours.ne)) == (int(tensor.tensor_type), tensor.shape.tolist())
        tokens = model.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, GgufArray)
        assert list(tokens.strings()) == theirs.fields["tokenizer.ggml.tokens"].contents()


def test_sizes_of_types() -> None:
    """Against the table of the gguf package, which knows all but the newest (and another Q8_1, an activation type)."""
    for kind, (block, size) in GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":
            assert TYPES[int(kind)][1:] == (kind.name, block, size)
    assert TYPES[42] == (42, "Q2_0", 64, 18)


def test_older_version_and_other_alignment(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    header = header_bytes({"general.alignment": Value("u32", 64)}, [zeros("a", (8,))])
    data = bytearray(header + b"\0" * (-len(header) % 64) + b"\1" * 32)
    data[4] = 2
    path.write_bytes(data)
    found = read(path)
    assert (found.version, found.alignment, found.data_offset) == (2, 64, len(data) - 32)


@pytest.mark.parametrize(
    ("where", "fmt", "value", "message"),
    [
        (0, "<I", 0, "dimensions of tensor 'second' .* expected 1 to 4, found 0"),
        (0, "<I", 5, "dimensions of tensor 'second' .* expected 1 to 4, found 5"),
        (4, "<Q", 0, r"shape of tensor 'second' .* positive sizes with a product below 2\^63, found \[0\]"),
        (4, "<Q", 2**63, r"shape of tensor 'second' .* found \[9223372036854775808\]"),
        (4, "<Q", 2**40, "data of tensor 'second': expected 4398046511104 bytes from byte"),
        (12, "<I", 43, r"type of tensor 'second' .* a type of ggml \(0 to 42\), found type 43"),
        (12, "<I", 4, "found type 4"),
        (12, "<I", 31, "found type 31"),
        (12, "<I", 2**32 - 1, "found type 4294967295"),
        (12, "<I", 12, "rows of tensor 'second' .* a multiple of 256 values for Q4_K, found 32"),
        (16, "<Q", 1, r"offset of tensor 'second': expected 128 \(aligned to 32, .*\), found 1"),
        (16, "<Q", 0, "offset of tensor 'second': expected 128 .*, found 0"),
        (16, "<Q", 160, "offset of tensor 'second': expected 128 .*, found 160"),
        (16, "<Q", 2**63, "offset of tensor 'second': expected 128 .*, found 9223372036854775808"),
    ],
)
def test_rows_of_the_tensor_table(tmp_path: Path, where: int, fmt: str, value: int, message: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {}, [zeros("first"), zeros("second"), zeros("third")])
    data = bytearray(path.read_bytes())
    struct.pack_into(fmt, data, data.index(b"second") + 6 + where, value)
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message):
        read(path)


def test_shapes_that_overflow(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    good = zeros("a", (32, 1, 1, 1))
    write_gguf(path, {}, [replace(good, ne=(32, 1, 1, 1))])
    data = bytearray(path.read_bytes())
    struct.pack_into("<4Q", data, data.index(b"a", 24) + 5, 2**32, 2**32, 2**32, 2)
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"product below 2\^63"):
        read(path)


def test_a_name_twice(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {}, [zeros("a"), zeros("a")])
    with pytest.raises(ModelError, match="tensor 'a': expected a name of its own, found the name twice"):
        read(tmp_path / "m.gguf")


def test_a_name_too_long(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {}, [zeros("a" * 64)])
    with pytest.raises(ModelError, match="length of name of tensor 0 .*: expected at most 63, found 64"):
        read(tmp_path / "m.gguf")


def test_a_key_twice(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {"key.a": Value("u32", 1), "key.b": Value("u32", 2)}, [])
    path.write_bytes(path.read_bytes().replace(b"key.b", b"key.a"))
    with pytest.raises(ModelError, match="key 1 .*: expected a new name, found 'key.a' again"):
        read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"GGML" + d[4:], "first four bytes: expected GGUF, found b'GGML'. This is not a GGUF file"),
        (lambda d: d[:3], "magic at byte 0: expected 4 bytes, found 3 bytes"),
        (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "version of GGUF: expected 2 or 3, found 1"),
        (lambda d: d[:4] + struct.pack("<I", 4) + d[8:], "version of GGUF: expected 2 or 3, found 4"),
        (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "byte order: expected little-endian, found big-endian"),
        (lambda d: d[:8] + struct.pack("<Q", 2**60) + d[16:], "number of tensors at byte 8: expected at most"),
        (lambda d: d[:16] + struct.pack("<Q", 2**60) + d[24:], "number of keys at byte 16: expected at most"),
        (lambda d: d.replace(b"key", b"\xff\xfe\xfd"), "key 0 at byte 32: expected UTF-8 text"),
        (
            lambda d: d.replace(struct.pack("<I", 9), struct.pack("<I", 13)),
            "type of key .*: expected 0 to 12, found 13",
        ),
        (
            lambda d: d.replace(struct.pack("<II", 9, 4), struct.pack("<II", 9, 9)),
            "element type of key .*: expected 0 to 12 and no array of arrays, found 9",
        ),
        (
            lambda d: d.replace(struct.pack("<Q", 2), struct.pack("<Q", 2**40)),
            "number of elements of key .*: expected at most 2, found 1099511627776",
        ),
    ],
)
def test_the_header(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {"key": Value("u32", [5, 6])}, [])
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ModelError, match=message):
        read(path)


def test_bytes_after_the_last_tensor(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", MICRO)[0]
    with path.open("ab") as file:
        file.write(b"\0" * 31)
    with open_model(path) as model:
        assert not model.warnings, "padding"
    with path.open("ab") as file:
        file.write(b"\0" * 100)
    with open_model(path) as model:
        assert "131 bytes follow the last tensor" in model.warnings[0]


def test_a_large_vocabulary_loads_quickly(tmp_path: Path) -> None:
    """250,000 tokens and as many merges: a walk over their lengths, no strings made."""
    shape = replace(MICRO, n_vocab=250_000, dense="Q8_0")
    path = tmp_path / "m.gguf"
    merges = Value("string", [f"tok{i} en{i}" for i in range(250_000)])
    metadata = {**model_metadata(shape, 1, "large"), "tokenizer.ggml.merges": merges}
    write_gguf(path, metadata, model_tensors(shape, 1, Quantiser()))
    start = time.process_time()
    with open_model(path) as model:
        seconds = time.process_time() - start
        tokens = model.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, GgufArray) and len(tokens) == 250_000
        assert sum(1 for _ in tokens.strings()) == 250_000
    assert seconds < 1.0


def test_use_after_close(tmp_path: Path) -> None:
    model = open_model(write_model(tmp_path / "m.gguf", MICRO)[0])
    info = model.tensors["token_embd.weight"]
    assert model.address(info)
    model.close()
    model.close()
    for use in (model.address, model.read):
        with pytest.raises(ValueError, match="closed"):
            use(info)
