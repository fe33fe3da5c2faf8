"""The routed experts of a runner with an expert device: all of them there, the hot ones on the target as well."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any, Final

from pyluce.graph.experts import ExpertSide
from pyluce.graph.options import RunnerOptions
from pyluce.graph.swapping import Swapper
from pyluce.native.backend import Backend
from pyluce.native.devices import device_memory, parse_device
from pyluce.native.errors import NativeError
from pyluce.native.library import GPU_BACKENDS
from pyluce.native.link import LinkSpeed, measure_link, peer_access
from pyluce.native.luce import Phase
from pyluce.placement.counts import RouteShape
from pyluce.placement.hot import HotSet
from pyluce.placement.learner import HotLearner
from pyluce.tuning import AUTO, OFF, Product, TunedDevice, TuneError, tune_device
from pyluce.weights import ModelFile, Progress
from pyluce.weights.experts import HotExperts, trunk_experts

MIB: Final = 1 << 20

log = logging.getLogger(__name__)


def check_expert_device(model: ModelFile, name: str) -> None:
    """Raise NativeError unless the device is there and has room for the routed experts; nothing is loaded."""
    needed = sum(info.nbytes for info in trunk_experts(model))
    free, total = device_memory(name)
    if free < needed:
        raise NativeError(
            f"expert_device: expected {needed / MIB:.1f} MiB free on {name} for the routed experts, "
            f"found {free / MIB:.1f} of {total / MIB:.1f} MiB"
        )


def tune_devices(options: RunnerOptions, products: list[Product]) -> list[TunedDevice]:
    """Set the choices of the device, then those of a GPU of this machine that has the experts. Raises TuneError, with nothing held.

    A server's device has its defaults, so that beside one there is no table: the same product must give the same bits on both.
    """
    remote = options.expert_device is not None and options.expert_device.startswith("rpc:")
    if remote and options.tune not in (AUTO, OFF):
        raise TuneError(f"expected auto or off with the expert device {options.expert_device}, found {options.tune}")
    found = [tune_device(options.device, OFF if remote else options.tune, products)]
    if options.expert_device is not None and parse_device(options.expert_device)[0] in GPU_BACKENDS:
        try:
            found.append(tune_device(options.expert_device, options.tune, products))
        except BaseException:
            found[0].close()
            raise
    return found


class SplitExperts:
    """Owns the expert device's side and the hot experts; the target's graphs are the runner's."""

    def __init__(
        self,
        options: RunnerOptions,
        model: ModelFile,
        target: Backend,
        progress: Progress | None,
        learner: HotLearner | None = None,
    ) -> None:
        """`learner`: what the hot experts follow. Raises NativeError, ModelError, or ValueError for a hot set that does not fit the model."""
        name, one_off = options.expert_device, options.debug_fault == "hot_slot"
        if name is None:
            raise ValueError("expert_device: expected one, found none")
        h = model.hparams
        self._name = name
        self._model = model
        self._target = target
        self._side: ExpertSide | None = None
        self._peers = False
        self._link = LinkSpeed(0.0, 0.0)
        self._streams = options.prompt_streams
        hot = options.hot_experts or HotSet.empty(h.n_layer)
        hot.check(RouteShape(h.n_layer, h.n_expert, h.n_expert_used))
        self.hot = HotExperts(model, target, hot, one_off=one_off)
        self.swapper: Swapper | None = None
        try:
            self.swapper = Swapper(learner, self.hot) if learner is not None else None
            self._connect(progress)
        except BaseException:
            self.close()
            raise

    @property
    def lost(self) -> bool:
        """The expert device has gone; `reconnect` looks for it."""
        return self._side is None or self._side.backend.is_lost

    @property
    def side(self) -> ExpertSide:
        """The expert device's side."""
        if self._side is None:
            raise NativeError(f"the expert device {self._name} has gone")
        return self._side

    def reconnect(self) -> None:
        """Load the experts anew: no graph of before may be used any more. Raises NativeError while the device is not there."""
        if self._side is not None:
            log.warning("the expert device %s has gone; connecting to it again", self._name)
            self._side.close()
            self._side = None
        check_expert_device(self._model, self._name)
        self._connect(None)
        log.warning("the expert device %s is there again", self._name)

    def _connect(self, progress: Progress | None) -> None:
        self._peers = peer_access(self._target.name, self._name, True)
        self._side = ExpertSide(self._name, self._model, progress)
        self._link = measure_link(self._target, self._side.backend)

    def drop(self, phase: Phase, n_rows: int, stream: int) -> None:
        """Nothing of this shape is used any more."""
        if self._side is not None:
            self._side.drop(phase, n_rows, stream)

    def report(self) -> dict[str, Any]:
        """Bytes on both devices; `lost`: the expert device has gone."""
        found: dict[str, Any] = {
            "device": self._name,
            "lost": self.lost,
            "hot_experts": self.hot.hot.n_hot,
            "hot_bytes": self.hot.n_bytes,
            "prompt_streams": self._streams,
            **(self.swapper.report() if self.swapper is not None else {}),
        }
        if not self.lost:
            free, total = device_memory(self._name)
            found["link"] = {"peer_access": self._peers, **asdict(self._link)}
            found |= {
                "bytes": self.side.weights.n_bytes,
                "graph_bytes": self.side.graph_bytes,
                "free": free,
                "total": total,
            }
        return found

    def close(self) -> None:
        """Free both sides. Idempotent."""
        if self.swapper is not None:
            self.swapper.close()
        if self._side is not None:
            self._side.close()
            self._side = None
        if self._peers:
            self._peers = False
            peer_access(self._target.name, self._name, False)
        self.hot.close()
