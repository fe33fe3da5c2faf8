"""What cannot be an expert device is refused before anything is loaded, each for its own reason."""

from __future__ import annotations

from typing import Any

import pytest

from pyluce.graph import RunnerOptions, two_devices
from pyluce.native.errors import NativeError
from pyluce.placement.hot import HotSet
from tests.split.schedule import N_LAYER, OPTIONS, model
from tests.split.server import RpcServer
from tests.support.device import only_cpu
from tests.support.models import ModelCache
from tests.support.runs import open_runner


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_device": "cpu"}, "expert_device: expected another device than cpu, found the same"),
        ({"expert_device": "gpu"}, "expert_device: expected cpu, cuda:N, hip:N or rpc:HOST:PORT, found 'gpu'"),
        ({"expert_device": "rpc:there:0"}, "expert_device: expected cpu"),
        ({"hot_experts": HotSet(((0,),))}, "hot_experts: expected with an expert_device only"),
        ({"expert_device": "cuda:0", "repack": True}, "repack: expected False with an expert_device"),
        ({"device": "rpc:127.0.0.1:1"}, "device: expected cpu, cuda:N or hip:N .*, found 'rpc:127.0.0.1:1'"),
    ],
)
def test_by_their_names(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunnerOptions(**{"repack": False, **options})


@only_cpu
def test_too_little_memory(server: RpcServer, model_cache: ModelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_devices, "device_memory", lambda name: (1000, 1 << 30))
    with pytest.raises(
        NativeError, match="expected 5.1 MiB free on rpc.* for the routed experts, found 0.0 of 1024.0 MiB"
    ):
        with open_runner(model(model_cache, "Q4_K"), expert_device=server.device, **OPTIONS):
            pass


@only_cpu
@pytest.mark.parametrize(
    ("hot", "message"),
    [
        (HotSet(((0,),)), "expected 6 layers, found 1"),
        (HotSet(((8,),) * N_LAYER), "expected ids from 0 to 7, found 8"),
        (HotSet(((1, 1),) * N_LAYER), "found one twice"),
    ],
)
def test_hot_sets_of_another_model(server: RpcServer, model_cache: ModelCache, hot: HotSet, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with open_runner(model(model_cache, "Q4_K"), expert_device=server.device, hot_experts=hot, **OPTIONS):
            pass
