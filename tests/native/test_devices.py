"""Devices by the names that users give: what is accepted, and what is said of one that is not there."""

from __future__ import annotations

import pytest

from pyluce.graph import RunnerOptions
from pyluce.native import Backend, NativeError, devices, list_devices, load_libraries, log
from pyluce.native.devices import device_memory, find_device, parse_device
from pyluce.native.reset import reset_device
from pyluce.options import LoadOptions, OptionError
from tests.support.device import BACKEND, DEVICE, ON_GPU


def test_names() -> None:
    assert parse_device("cpu") == ("cpu", 0)
    assert parse_device("cuda:0") == ("cuda", 0)
    assert parse_device("hip:12") == ("hip", 12)
    assert parse_device("rpc:box.local:50052") == ("rpc", 0)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "gpu",
        "cuda",
        "cuda:",
        "cuda:-1",
        "cuda:1x",
        "CUDA0",
        "cpu:0",
        "vulkan:0",
        "cuda:0\n",
        "rpc:box",
        "rpc:box:70000",
    ],
)
def test_what_is_no_device_is_refused_everywhere(name: str) -> None:
    with pytest.raises(ValueError, match="expected cpu, cuda:N, hip:N or rpc:HOST:PORT"):
        parse_device(name)
    with pytest.raises(ValueError, match="device: expected cpu"):
        RunnerOptions(device=name)
    with pytest.raises(OptionError, match="device: expected cpu, cuda:N or hip:N, found"):
        LoadOptions(device=name)


def test_the_cpu_is_listed_and_found() -> None:
    cpu = next(info for info in list_devices() if info.device == "cpu")
    assert cpu.architecture is None and cpu.memory_total_bytes > 0
    free, total = device_memory("cpu")
    assert 0 < free <= total
    with Backend("cpu") as backend:
        assert backend.device == find_device("cpu")


def test_a_gpu_without_its_libraries_is_a_clear_error() -> None:
    with pytest.raises(NativeError, match="one set of libraries in a process|expected the device"):
        Backend("hip:7")


def test_only_a_gpu_can_be_reset() -> None:
    with pytest.raises(ValueError, match="expected a GPU to reset, found the CPU"):
        reset_device("cpu")
    with pytest.raises(OptionError, match="park_reset: expected a GPU as device, found cpu"):
        LoadOptions(park_reset=True)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_gpu_that_is_in_use_is_not_reset() -> None:
    load_libraries(BACKEND)
    with Backend(DEVICE), pytest.raises(NativeError, match="1 backends, buffers or events of this process still use"):
        reset_device(DEVICE)


def test_threads_are_the_cpus() -> None:
    with pytest.raises(ValueError, match="n_threads: expected 1 with the device cuda:0, found 2"):
        RunnerOptions(device="cuda:0", n_threads=2)
    with pytest.raises(OptionError, match="threads: expected none with the device hip:0, found 1"):
        LoadOptions(device="hip:0", threads=1)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("  Device 0: NVIDIA H200, compute capability 9.0, VMM: yes, VRAM: 143771 MiB", "compute capability 9.0"),
        ("  Device 0: AMD Radeon, gfx1151 (0x1151), VMM: no, Wave Size: 32, VRAM: 1 MiB", "gfx1151"),
        ("  Device 10: NVIDIA H200, compute capability 9.0, VMM: yes", None),
    ],
)
def test_the_architecture_is_read_from_the_log(
    line: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "ring", log.LogRing())
    log.note(line)
    assert devices._architecture("cuda:0") == expected
