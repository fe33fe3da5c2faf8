"""A graph of one device that leaves parts to another: see ``ggml_luce_split`` in ggml-luce.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from pyluce.native import callbacks, log, luce
from pyluce.native.backend import Backend, check_status
from pyluce.native.errors import DeviceLostError, NativeError
from pyluce.native.owner import Owner
from pyluce.native.structs import GGMLStatus
from pyluce.native.tensors import Graph


@dataclass(frozen=True, slots=True)
class Away:
    """What an expert device computes for one layer: which tensors of the target become which of its own, and the result's way back.

    send_at, receive_at: how many nodes of the target's graph come before the sending, and before the receiving.
    """

    graph: Graph
    send_at: int
    receive_at: int
    sends: Sequence[tuple[int, int]]
    result: int
    into: int


class SplitGraph(Owner):
    """A graph whose tensors have memory, with its parts for the expert device, in order. Close it before the graphs."""

    def __init__(self, target: Backend, expert: Backend, graph: Graph, parts: Sequence[Away]) -> None:
        """Raises NativeError when the parts do not fit the graph, or no memory can be had."""
        super().__init__()
        self._target = target
        self._expert = expert
        self._graphs = [graph, *(part.graph for part in parts)]
        pointer = luce.ggml_luce_split_new(target.ptr, expert.ptr, graph.ptr)
        address = self._own("ggml_luce_split_new", pointer, luce.ggml_luce_split_free)
        for part in parts:
            n = len(part.sends)
            source = (ctypes.c_void_p * n)(*(a for a, _ in part.sends))
            to = (ctypes.c_void_p * n)(*(b for _, b in part.sends))
            if not luce.ggml_luce_split_add(
                address, part.send_at, part.receive_at, part.graph.ptr, n, source, to, part.result, part.into
            ):
                self.close()
                raise NativeError(
                    f"expected a part that fits a graph of {graph.n_nodes} nodes, found {part}", log.take()
                )

    def start(self, *others: SplitGraph) -> None:
        """As `Backend.start` of the target. Raises DeviceLostError when the expert device has gone.

        `others`: graphs that are computed with it, layer by layer, each after those before it; see ``ggml_luce_split_compute_streams``.
        """
        for split in (self, *others):
            for graph in split._graphs:
                graph.check_memory()
        self._target.busy()
        if others:
            pointers = (ctypes.c_void_p * (1 + len(others)))(self.ptr, *(other.ptr for other in others))
            status = luce.ggml_luce_split_compute_streams(pointers, len(pointers))
        else:
            status = luce.ggml_luce_split_compute(self.ptr)
        callbacks.raise_pending()
        if status != GGMLStatus.SUCCESS and self._expert.is_lost:
            raise DeviceLostError(
                f"the expert device {self._expert.name} has gone in the middle of a step; start it again: the next step connects "
                "to it anew",
                log.take(),
            )
        check_status(status, "ggml_luce_split_compute")

    def n_bytes(self) -> tuple[int, int]:
        """Bytes that one computation sends to the expert device, and gets from it."""
        sent, received = ctypes.c_int64(), ctypes.c_int64()
        luce.ggml_luce_split_bytes(self.ptr, ctypes.byref(sent), ctypes.byref(received))
        return sent.value, received.value
