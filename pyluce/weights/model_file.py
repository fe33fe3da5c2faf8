"""Opens a model: all its shards, mapped and checked, nothing read that is not asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from pyluce.native.guard import ggml_luce_guard_faults
from pyluce.weights.catalogue import Mtp, MtpStatus, check_model, check_sidecar
from pyluce.weights.draft_vocabulary import DRAFT_VOCAB, compact_ids, pays
from pyluce.weights.errors import ModelError, refuse
from pyluce.weights.gguf_reader import MetaValue
from pyluce.weights.hparams import HParams, read_hparams
from pyluce.weights.shards import Shard, check_split, shard_paths
from pyluce.weights.tensors import DRAFT_EMBEDDING, DRAFT_OUTPUT, OUTPUT, TOKEN_EMBEDDING, TensorInfo
from pyluce.weights.vocabulary_keys import check_vocabulary

LOOK_S: Final = 1.0
"""How often a file that is in use is asked for its size and time of change."""


class Progress(Protocol):
    """Told what happens and how far it is: a short stage name, and `done` of `total` (files or bytes, by stage)."""

    def __call__(self, stage: str, done: int, total: int, /) -> None: ...


class ModelFile:
    """An opened model. Owns its shards; `tensors` are the trunk's (with embedding, output, PLE), MTP is apart.

    `warnings` are for the user: unknown keys and tensors, an MTP block that cannot be used.
    """

    def __init__(
        self,
        path: str,
        hparams: HParams,
        tensors: dict[str, TensorInfo],
        mtp: Mtp,
        shards: list[Shard],
        warnings: list[str],
    ) -> None:
        self.path = path
        self.hparams = hparams
        self.tensors = tensors
        self.mtp = mtp
        self.shards = shards
        self.warnings = warnings
        self.draft_ids: npt.NDArray[np.int64] | None = None
        self._faults = 0
        self._look_at = 0.0

    @property
    def metadata(self) -> Mapping[str, MetaValue]:
        """Metadata of the first shard; arrays are readable until `close()`."""
        return self.shards[0].metadata

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors of the trunk."""
        return sum(t.nbytes for t in self.tensors.values())

    def address(self, info: TensorInfo) -> int:
        """Address of the tensor's first byte in the map; valid until `close()`."""
        return self.shards[info.shard].base_address + info.offset

    def read(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """A copy of the tensor's bytes, read from the file (not through the map)."""
        out = np.empty(info.nbytes, np.uint8)
        self.read_into(info, out)
        return out

    def attach_draft(self, *, embedding: bool = False, vocabulary: int = DRAFT_VOCAB) -> None:
        """Add the draft head's tensors to `tensors`, to be placed with the trunk's; those of its indexer are not used.

        The head's own embedding and output, if it brings them, are called `DRAFT_EMBEDDING` and `DRAFT_OUTPUT`. `embedding`: name
        the trunk's embedding so where it brings none, for a device on which the trunk has none. `vocabulary`: tokens that are
        drafted at most, where that pays (`draft_ids`); their rows are copied, and a device needs no others. ModelError without a head.
        """
        if self.mtp.status is not MtpStatus.PRESENT:
            refuse(self.path, "MTP block", expected="one", found=self.mtp.reason or "none")
        own = {TOKEN_EMBEDDING: DRAFT_EMBEDDING, OUTPUT: DRAFT_OUTPUT}
        for info in self.mtp.tensors.values():
            if ".indexer." not in info.name:
                name = own.get(info.name, info.name)
                self.tensors[name] = replace(info, name=name)
        if pays(self.hparams.n_vocab, vocabulary):
            self.draft_ids = compact_ids(self.metadata, self.hparams.n_vocab, vocabulary)
        elif embedding and DRAFT_EMBEDDING not in self.tensors and OUTPUT in self.tensors:
            self.tensors[DRAFT_EMBEDDING] = replace(self.tensors[TOKEN_EMBEDDING], name=DRAFT_EMBEDDING)

    def read_into(self, info: TensorInfo, out: npt.NDArray[np.uint8], offset: int = 0) -> None:
        """Fill `out` with the tensor's bytes from `offset` on, read from the file. Safe from any thread."""
        shard, done = self.shards[info.shard], 0
        while done < out.nbytes:
            got = os.preadv(shard.fd, [out.data[done : done + (1 << 30)]], info.offset + offset + done)
            if not got:
                found = f"{offset + done}: the file was truncated after it was opened"
                refuse(shard.path, f"data of {info.name}", expected=f"{info.nbytes} bytes", found=found)
            done += got

    def gather(self, info: TensorInfo, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """The bytes of a matrix's rows `ids`, which rise: [len(ids), bytes of a row]."""
        row_bytes = info.nbytes // info.ne[1]
        out = np.empty((len(ids), row_bytes), np.uint8)
        starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
        for first, last in zip(starts, [*starts[1:], len(ids)], strict=True):
            self.read_into(info, out[first:last].reshape(-1), int(ids[first]) * row_bytes)
        return out

    def guard(self) -> None:
        """See `Shard.guard`."""
        for shard in self.shards:
            shard.guard()
        self._faults = ggml_luce_guard_faults(None)

    def check_intact(self, *, now: bool = False) -> None:
        """Raise `ModelError` when what was read since the last call may not be what the files held when they were opened.

        Accesses beyond a file's end are seen at once; that a file was written to only once in `LOOK_S` seconds, or with `now`.
        """
        faults, clock = ggml_luce_guard_faults(None), time.monotonic()
        if faults == self._faults and clock < self._look_at and not now:
            return
        for shard in self.shards:
            shard.check_intact()
        self._faults, self._look_at = faults, clock + LOOK_S

    def close(self) -> None:
        """Unmap and close every shard. Idempotent."""
        for shard in self.shards:
            shard.close()

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_model(
    path: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    draft: str | os.PathLike[str] | None = None,
    whole: bool = True,
) -> ModelFile:
    """Open and validate the model at `path` (a file, or any shard of it).

    `draft`: an MTP sidecar to use instead of the block in the file. Without it a sidecar beside the model
    (`mtp-*.gguf`, there or in `MTP/`) is taken when the file has no MTP block. `whole` False: each file may end behind its header;
    no data must be read then.
    Raises `ModelError` for everything that is wrong with the files.
    """
    shards: list[Shard] = []
    try:
        paths = shard_paths(Path(path))
        for i, part in enumerate(paths):
            shards.append(Shard(part, whole=whole))
            if progress:
                progress("open", i + 1, len(paths))
        check_split(shards)
        first = str(shards[0].path)
        hparams, warnings = read_hparams(shards[0].metadata, first)
        warnings += check_vocabulary(shards[0].metadata, first, hparams.n_vocab) + _trailing_data_warnings(shards)
        catalogue = check_model(first, hparams, _collect(shards, 0))
        warnings += catalogue.warnings
        mtp = catalogue.mtp
        if draft is not None:
            mtp = _attach_sidecar(shards, hparams, Path(draft), whole)
        elif mtp.status is not MtpStatus.PRESENT:
            mtp = _discover_sidecar(shards, hparams, mtp, warnings, whole)
        return ModelFile(first, hparams, catalogue.tensors, mtp, shards, warnings)
    except BaseException:
        for shard in shards:
            shard.close()
        raise


def _collect(shards: list[Shard], first_index: int) -> dict[str, TensorInfo]:
    """The tensors of the shards by name; a name may occur once."""
    tensors: dict[str, TensorInfo] = {}
    for index, shard in enumerate(shards[first_index:], first_index):
        for entry in shard.header.tensors:
            if entry.name in tensors:
                other = shards[tensors[entry.name].shard].path.name
                refuse(shard.path, f"tensor {entry.name}", expected="it in one shard", found=f"it in {other} as well")
            tensors[entry.name] = TensorInfo(entry.name, entry.type_id, entry.ne, entry.nbytes, index, entry.offset)
    return tensors


def _attach_sidecar(shards: list[Shard], hparams: HParams, path: Path, whole: bool) -> Mtp:
    """Open the sidecar as one more shard and check that it fits the model."""
    sidecar = Shard(path, whole=whole)
    try:
        theirs, _ = read_hparams(sidecar.metadata, str(path), mtp_only=True)
        mtp = check_sidecar(str(path), hparams, theirs, _collect([*shards, sidecar], len(shards)))
    except BaseException:
        sidecar.close()
        raise
    shards.append(sidecar)
    return mtp


def _discover_sidecar(shards: list[Shard], hparams: HParams, mtp: Mtp, warnings: list[str], whole: bool) -> Mtp:
    """A sidecar beside the model, if one fits; one that does not fit leaves a warning."""
    folder = shards[0].path.parent
    for candidate in [*sorted(folder.glob("MTP/mtp-*.gguf")), *sorted(folder.glob("mtp-*.gguf"))]:
        try:
            return _attach_sidecar(shards, hparams, candidate, whole)
        except ModelError as error:
            warnings.append(f"{candidate}: not used as MTP sidecar: {error}")
            mtp = Mtp(MtpStatus.INCOMPLETE, reason=str(error), path=str(candidate))
    return mtp


def _trailing_data_warnings(shards: list[Shard]) -> list[str]:
    warnings = []
    for shard in shards:
        header = shard.header
        end = max([header.data_offset, *(t.offset + t.nbytes for t in header.tensors)])
        if shard.size_bytes - end >= header.alignment:
            warnings.append(f"{shard.path}: {shard.size_bytes - end} bytes follow the last tensor; ignored")
    return warnings
