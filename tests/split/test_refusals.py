"""What cannot be an expert device is refused before anything is loaded, each for its own reason."""

from __future__ import annotations

from typing import Any

import pytest

from cli.main import main
from pyluce.graph import RunnerOptions, two_devices
from pyluce.native.errors import NativeError
from pyluce.placement.hot import HotSet
from tests.split.schedule import N_LAYER, OPTIONS, model
from tests.split.server import RpcServer, free_port
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


@only_cpu
def test_doctor_asks_servers(server: RpcServer, capsys: pytest.CaptureFixture[str]) -> None:
    there, nobody = server.device.removeprefix("rpc:"), f"127.0.0.1:{free_port()}"
    assert main(["doctor", "--rpc", there, "--rpc", nobody]) == 0
    out = capsys.readouterr().out
    assert f"device: rpc:{there}, cpu, " in out and ", rpc, " in out and "GiB free" in out
    assert f"missing: rpc:{nobody}: expected `luce rpc-server` of this version at {nobody}, found none" in out
    assert main(["doctor", "--rpc", "nowhere"]) == 2
    assert "--rpc: expected HOST:PORT, found 'nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "localhost"], "--host or --device:"),
        (["--device", "gpu"], "expected cpu, cuda:N, hip:N or rpc:HOST:PORT, found 'gpu'"),
        (["--device", "rpc:a:1"], "--device: expected a device of this machine"),
        (["--device", "cuda:0", "--threads", "2"], "--threads: expected none with --device cuda:0"),
    ],
)
def test_what_cannot_be_served(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rpc-server", *arguments]) == 2
    assert message in capsys.readouterr().err


@only_cpu
def test_a_port_that_is_taken(server: RpcServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rpc-server", "--port", str(server.port)]) == 1
    assert f"127.0.0.1:{server.port} cannot be used" in capsys.readouterr().err
