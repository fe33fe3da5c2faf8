"""A very small model, in memory, that each test changes and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from pyluce.native import NativeError, load_libraries
from pyluce.weights import ModelFile, open_model
from pyluce.weights.ggml_types import TYPES_BY_NAME
from tools.synth import MICRO, Quantiser, Shape, Tensor, Value, model_metadata, model_tensors, write_gguf, write_shards


@dataclass
class Draft:
    """Metadata and tensors of a model that is about to be written."""

    metadata: dict[str, Value]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def set(self, key: str, kind: str, value: object) -> None:
        self.metadata[key] = Value(kind, value)

    def add(self, name: str, ne: tuple[int, ...], type_name: str = "F32") -> None:
        """A tensor of zeros, replacing one of that name."""
        kind = TYPES_BY_NAME[type_name]
        zeros = np.zeros(kind.row_bytes(ne[0]) * int(np.prod(ne[1:], dtype=np.int64)), np.uint8)
        self.tensors[name] = Tensor(name, ne, kind.id, lambda: iter([zeros]))

    def rename(self, name: str, new_name: str) -> None:
        self.tensors[new_name] = replace(self.tensors.pop(name), name=new_name)

    def write(self, path: Path) -> Path:
        write_gguf(path, self.metadata, list(self.tensors.values()))
        return path

    def write_shards(self, folder: Path, count: int) -> list[Path]:
        return write_shards(folder, "model", count, self.metadata, list(self.tensors.values()))


def make_draft(shape: Shape = MICRO, seed: int = 3) -> Draft:
    """A model with its tensors' bytes made once."""
    tensors = {}
    for tensor in model_tensors(shape, seed, Quantiser()):
        chunks = [np.ascontiguousarray(chunk) for chunk in tensor.data()]
        tensors[tensor.name] = replace(tensor, data=lambda chunks=chunks: iter(chunks))
    return Draft(model_metadata(shape, seed, "micro"), tensors)


@pytest.fixture(scope="session")
def micro() -> Draft:
    return make_draft()


@pytest.fixture(scope="session")
def micro_with_mtp() -> Draft:
    return make_draft(replace(MICRO, mtp=True))


@pytest.fixture
def draft(micro: Draft) -> Draft:
    """A micro model of one's own."""
    return Draft(dict(micro.metadata), dict(micro.tensors))


@pytest.fixture
def draft_with_mtp(micro_with_mtp: Draft) -> Draft:
    return Draft(dict(micro_with_mtp.metadata), dict(micro_with_mtp.tensors))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[Draft], ModelFile]]:
    """Writes a draft and opens it; closed at the end."""
    files: list[ModelFile] = []

    def open_draft(draft: Draft) -> ModelFile:
        files.append(open_model(draft.write(tmp_path / f"model{len(files)}.gguf")))
        return files[-1]

    yield open_draft
    for file in files:
        file.close()


@pytest.fixture(scope="session")
def libraries() -> None:
    """The native libraries; tests that need them are skipped while they are not built."""
    try:
        load_libraries()
    except NativeError as error:
        pytest.skip(f"native libraries: {error}")
