"""Puts a model's weights where the backend wants them: mapped from the file or repacked into memory, or copied to a GPU.

A matrix for which ggml has a faster interleaved layout is copied into it ("repacked") while loading; everything else
stays in the memory map and costs memory only as far as it is used. The PLE table is never placed: `PleTable` reads its
rows. A GPU has everything in a buffer of its own, but for the token embedding, whose rows are looked up in the map, unless it
is the output matrix too. Of ggml's extra buffer types only the repacking one is used, as the row kernels are exact there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from pyluce.native import ggml
from pyluce.native.backend import Backend, BackendBuffer, cpu_repack_buffer_type
from pyluce.native.ggml_backend import BackendBufferUsage
from pyluce.native.structs import GGMLType
from pyluce.native.tensors import TensorArena, tensor_set, tensor_struct
from pyluce.weights.model_file import ModelFile, Progress
from pyluce.weights.tensors import DRAFT_EMBEDDING, OUTPUT, PLE_TABLE, TOKEN_EMBEDDING, TensorInfo
from pyluce.weights.upload import upload

PROBE_ROWS: Final = 512
"""Columns of the product that ggml is asked about; a chunk of a prompt has about as many."""


@dataclass(frozen=True, slots=True)
class PlacementReport:
    """Bytes of weights by place. `mapped_bytes` are resident as far as they were used, the table on disk never."""

    mapped_bytes: int
    mapped_tensors: int
    repacked_bytes: int
    repacked_tensors: int
    ple_table_bytes: int
    device_bytes: int = 0
    device_tensors: int = 0

    @property
    def memory_bytes(self) -> int:
        """What the weights take at most in the host's memory."""
        return self.mapped_bytes + self.repacked_bytes


class Weights:
    """The placed tensors of the trunk, by name. Close it before the `ModelFile` that it maps."""

    def __init__(
        self, tensors: dict[str, int], arenas: list[TensorArena], buffers: list[BackendBuffer], report: PlacementReport
    ) -> None:
        self._tensors = tensors
        self._arenas = arenas
        self._buffers = buffers
        self._report = report

    def tensor(self, name: str) -> int:
        """The `ggml_tensor *` of that name; `KeyError` if there is none (an optional tensor, or the PLE table)."""
        return self._tensors[name]

    def get(self, name: str) -> int | None:
        """The `ggml_tensor *` of that name, or None."""
        return self._tensors.get(name)

    def adopt(self, tensors: Mapping[str, int]) -> None:
        """Know tensors that somebody else owns, by name, as if they were of the file."""
        self._tensors.update(tensors)

    def report(self) -> PlacementReport:
        return self._report

    def close(self) -> None:
        """Free the copies and let go of the map. The tensors are invalid afterwards. Idempotent."""
        self._tensors = {}
        for buffer in reversed(self._buffers):
            buffer.close()
        for arena in reversed(self._arenas):
            arena.close()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def place_weights(
    model_file: ModelFile,
    backend: Backend,
    *,
    repack: bool = True,
    copy: bool | None = None,
    leave: Collection[str] = (),
    progress: Progress | None = None,
) -> Weights:
    """Make a ggml tensor for every tensor of the trunk but the PLE table.

    `leave`: tensors that are placed elsewhere. `repack` is for the CPU. `copy`: copy everything into one buffer of the backend; None: for a GPU.
    `progress` is told the stage `weights` with bytes done and in all, while matrices are copied. Raises `ModelError` if
    the file cannot be read, `NativeError` if memory cannot be had.
    """
    if copy if copy is not None else not backend.is_cpu:
        return _copied(model_file, backend, leave, progress)
    wanted = [t for t in model_file.tensors.values() if t.name != PLE_TABLE and t.name not in leave]
    n_used = model_file.hparams.n_expert_used
    repack_type, repacked = repacked_tensors(wanted, n_used, backend) if repack else (None, [])
    names = {t.name for t in repacked}
    mapped = [t for t in wanted if t.name not in names]

    tensors: dict[str, int] = {}
    arenas: list[TensorArena] = []
    buffers: list[BackendBuffer] = []
    table = model_file.tensors.get(PLE_TABLE)
    report = PlacementReport(
        mapped_bytes=sum(t.nbytes for t in mapped),
        mapped_tensors=len(mapped),
        repacked_bytes=sum(t.nbytes for t in repacked),
        repacked_tensors=len(repacked),
        ple_table_bytes=table.nbytes if table else 0,
    )
    weights = Weights(tensors, arenas, buffers, report)
    try:
        arenas.append(TensorArena.for_counts(len(wanted)))
        maps: dict[int, BackendBuffer] = {}
        for info in mapped:
            if info.shard not in maps:
                shard = model_file.shards[info.shard]
                buffer = BackendBuffer.from_pointer(shard.base_address, shard.size_bytes, keep=shard.mapped)
                buffer.set_usage(BackendBufferUsage.WEIGHTS)
                buffers.append(buffer)
                maps[info.shard] = buffer
            tensors[info.name] = arenas[0].new_tensor(info.type_id, info.ne, info.name)
            maps[info.shard].place(tensors[info.name], model_file.address(info))
        if repack_type is not None and repacked:
            arenas.append(TensorArena.for_counts(len(repacked)))
            for info in repacked:
                tensors[info.name] = arenas[1].new_tensor(info.type_id, info.ne, info.name)
            buffers.append(BackendBuffer.for_arena(arenas[1], repack_type, BackendBufferUsage.WEIGHTS))
            _copy(model_file, repacked, tensors, progress)
    except BaseException:
        weights.close()
        raise
    return weights


def device_tensors(model_file: ModelFile) -> list[TensorInfo]:
    """What a GPU has of a model, in the order of the files."""
    on_host = {PLE_TABLE, TOKEN_EMBEDDING} if OUTPUT in model_file.tensors else {PLE_TABLE}
    return sorted((t for t in model_file.tensors.values() if t.name not in on_host), key=lambda t: (t.shard, t.offset))


def _copied(model_file: ModelFile, backend: Backend, leave: Collection[str], progress: Progress | None) -> Weights:
    """Everything in one buffer of the device, streamed from the files."""
    infos = [info for info in device_tensors(model_file) if info.name not in leave]
    embedding, table = model_file.tensors[TOKEN_EMBEDDING], model_file.tensors.get(PLE_TABLE)
    report = PlacementReport(
        mapped_bytes=embedding.nbytes,
        mapped_tensors=1,
        repacked_bytes=0,
        repacked_tensors=0,
        ple_table_bytes=table.nbytes if table else 0,
        device_bytes=sum(t.nbytes for t in infos),
        device_tensors=len(infos),
    )
    arena = TensorArena.for_counts(len(infos))
    weights = Weights({}, [arena], [], report)
    try:
        tensors = {t.name: arena.new_tensor(t.type_id, t.ne, t.name) for t in infos}
        weights._buffers.append(BackendBuffer.for_arena(arena, backend.buffer_type, BackendBufferUsage.WEIGHTS))
        upload(model_file, infos, tensors, backend, progress)
        weights._tensors.update(tensors)
    except BaseException:
        weights.close()
        raise
    return weights


def _copy(model_file: ModelFile, infos: list[TensorInfo], tensors: dict[str, int], progress: Progress | None) -> None:
    """Read each tensor whole and hand it to ggml, which lays it out anew.

    Read from the file and not through the map: the pages would stay resident beside the copy.
    """
    total = sum(t.nbytes for t in infos)
    done = 0
    for info in sorted(infos, key=lambda t: (t.shard, t.offset)):
        tensor_set(tensors[info.name], model_file.read(info))
        done += info.nbytes
        if progress:
            progress("weights", done, total)


def repacked_tensors(
    infos: list[TensorInfo], n_expert_used: int, backend: Backend
) -> tuple[int | None, list[TensorInfo]]:
    """The buffer type of the CPU's own layout (None: it has none), and the matrices that ggml multiplies by in it.

    Asked once for each type and shape.
    """
    repack_type = cpu_repack_buffer_type()
    if repack_type is None:
        return None, []
    answers: dict[tuple[int, tuple[int, ...]], bool] = {}
    chosen = []
    for info in infos:
        if info.name in (TOKEN_EMBEDDING, DRAFT_EMBEDDING) or len(info.ne) not in (2, 3):
            continue
        key = (info.type_id, info.ne)
        if key not in answers:
            answers[key] = _has_repacked_product(info, n_expert_used, backend, repack_type)
        if answers[key]:
            chosen.append(info)
    return repack_type, chosen


def _has_repacked_product(info: TensorInfo, n_used: int, backend: Backend, repack_type: int) -> bool:
    """Ask ggml as libllama does: a product with a weight of this type and shape in a buffer of that type."""
    with TensorArena.for_counts(8) as arena, BackendBuffer.of_size(repack_type, 0) as empty:
        weight = arena.new_tensor(info.type_id, info.ne)
        if len(info.ne) == 2:
            rows = arena.new_tensor(GGMLType.F32, (info.ne[0], PROBE_ROWS))
            product = ggml.ggml_mul_mat(arena.ptr, weight, rows)
        else:
            rows = arena.new_tensor(GGMLType.F32, (info.ne[0], n_used, PROBE_ROWS))
            ids = arena.new_tensor(GGMLType.I32, (n_used, PROBE_ROWS))
            product = ggml.ggml_mul_mat_id(arena.ptr, weight, rows, ids)
        header = tensor_struct(weight)
        header.buffer = empty.ptr
        supported = backend.supports(product)
        header.buffer = None
    return supported
