"""Routed experts on two devices: all of them on the expert device, the hot ones on the target as well."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from pyluce.native import ggml_backend as api
from pyluce.native.backend import Backend, BackendBuffer
from pyluce.native.errors import NativeError
from pyluce.native.ggml_backend import BackendBufferUsage
from pyluce.native.structs import GGMLType
from pyluce.native.tensors import TensorArena, tensor_set
from pyluce.placement.hot import HotSet
from pyluce.weights.model_file import ModelFile, Progress
from pyluce.weights.tensors import TensorInfo
from pyluce.weights.upload import upload

EXPERT_PARTS: Final = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps")


def layer_experts(model: ModelFile, layer: int) -> list[TensorInfo]:
    """The tensors of a layer's routed experts, [n_in, n_out, n_expert] each."""
    names = (f"blk.{layer}.{part}.weight" for part in EXPERT_PARTS)
    return [model.tensors[name] for name in names if name in model.tensors]


def trunk_experts(model: ModelFile) -> list[TensorInfo]:
    """Those of all layers of the trunk: the draft head's stay with it."""
    return [info for layer in range(model.hparams.n_layer) for info in layer_experts(model, layer)]


def slots_name(layer: int) -> str:
    """The name of a layer's table I32 [n_expert]: an expert's place among the hot ones, -1 for one that is not."""
    return f"blk.{layer}.hot_slots"


class ExpertWeights:
    """Every routed expert of the trunk on the expert device, by the tensor's name in the file. Owns their memory."""

    def __init__(self, model: ModelFile, backend: Backend, progress: Progress | None = None) -> None:
        """Raises ModelError if the file cannot be read, NativeError if memory cannot be had or the device has gone."""
        infos = sorted(trunk_experts(model), key=lambda info: (info.shard, info.offset))
        self.n_bytes = sum(info.nbytes for info in infos)
        self._arena = TensorArena.for_counts(len(infos))
        try:
            self.tensors = {info.name: self._arena.new_tensor(info.type_id, info.ne, info.name) for info in infos}
            BackendBuffer.for_arena(self._arena, backend.buffer_type, BackendBufferUsage.WEIGHTS)
            upload(model, infos, self.tensors, backend, progress)
            if backend.is_lost:
                raise NativeError(f"the expert device {backend.name} has gone while experts were copied to it")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._arena.close()


class HotExperts:
    """Copies of the hot experts on the target: for each tensor of a layer a stack of them, and the layer's table of slots.

    `tensors`: by the name that the whole tensor has in the file, and by `slots_name`. A layer without hot experts has none.
    """

    def __init__(self, model: ModelFile, backend: Backend, hot: HotSet, *, one_off: bool = False) -> None:
        """`one_off` plants a fault: the first two slots of every table are exchanged. Raises ModelError, NativeError."""
        self._model = model
        self._one_off = one_off
        self.hot = hot
        self.tensors: dict[str, int] = {}
        layers = [layer for layer, ids in enumerate(hot.layers) if ids]
        self._arena = TensorArena.for_counts(4 * len(layers) + 1)
        self.n_bytes = 0
        if not layers:
            return
        try:
            for layer in layers:
                for info in layer_experts(model, layer):
                    ne = (info.ne[0], info.ne[1], len(hot.layers[layer]))
                    self.tensors[info.name] = self._arena.new_tensor(info.type_id, ne, info.name)
                name = slots_name(layer)
                self.tensors[name] = self._arena.new_tensor(GGMLType.I32, (model.hparams.n_expert,), name)
            buffer = BackendBuffer.for_arena(self._arena, backend.buffer_type, BackendBufferUsage.WEIGHTS)
            self.n_bytes = buffer.n_bytes
            for layer in layers:
                for slot, expert in enumerate(hot.layers[layer]):
                    self._write(layer, slot, self.read(layer, expert))
                self._write_slots(layer)
        except BaseException:
            self.close()
            raise

    def replace(self, layer: int, slot: int, expert: int) -> None:
        """Put another expert into a slot of a layer; between steps, when nothing computes. Errors as of `HotSet.replaced`."""
        self.hot.replaced(layer, slot, expert)
        self.put(layer, slot, expert, self.read(layer, expert))

    def read(self, layer: int, expert: int) -> list[npt.NDArray[np.uint8]]:
        """An expert's weights from the file, for each of the layer's tensors. From any thread."""
        found = []
        for info in layer_experts(self._model, layer):
            size = info.nbytes // info.ne[2]
            found.append(np.empty(size, np.uint8))
            self._model.read_into(info, found[-1], expert * size)
        return found

    def put(self, layer: int, slot: int, expert: int, weights: list[npt.NDArray[np.uint8]]) -> None:
        """As `replace`, with weights that `read` returned."""
        self.hot = self.hot.replaced(layer, slot, expert)
        self._write(layer, slot, weights)
        self._write_slots(layer)

    def _write(self, layer: int, slot: int, weights: list[npt.NDArray[np.uint8]]) -> None:
        for info, part in zip(layer_experts(self._model, layer), weights, strict=True):
            api.ggml_backend_tensor_set(self.tensors[info.name], part.ctypes.data, slot * part.nbytes, part.nbytes)

    def _write_slots(self, layer: int) -> None:
        table = self.hot.target_table(layer, self._model.hparams.n_expert)
        if self._one_off and len(self.hot.layers[layer]) > 1:
            first, second = self.hot.layers[layer][:2]
            table[first], table[second] = table[second], table[first]
        tensor_set(self.tensors[slots_name(layer)], table)

    def close(self) -> None:
        """Free the copies. Idempotent."""
        self._arena.close()
