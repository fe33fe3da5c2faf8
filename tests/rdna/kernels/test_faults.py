"""The fault that a compiler does not report: a kernel that is nothing on one architecture. Every way to it turns a test red."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from buildtools import amd_check
from pyluce.selftest.bench import OpBench
from tests.rdna.codeobject import CodeObject
from tests.rdna.conftest import toolchain
from tests.rdna.errors import RdnaError
from tests.rdna.kernels.device import FakeDevice, Interpreter, Launch, StubError, check_code
from tests.rdna.kernels.sizes import SMALL, WIDE, case_of
from tests.rdna.stats import Stats

ROOT = Path(__file__).resolve().parents[3]
S_ENDPGM = struct.pack("<I", 0xBFB00000)


class Planted(Interpreter):
    """Executes another code object for the kernels that it has."""

    def __init__(self, code: CodeObject) -> None:
        super().__init__(races=False)
        self.code = code

    def __call__(self, launch: Launch) -> Stats:
        if launch.kernel in self.code.kernels:
            launch.code = self.code
        return super().__call__(launch)


def test_a_kernel_that_ends_at_once_fails_its_comparison(arch: str, device: str) -> None:
    case = case_of("silu_scale", SMALL)
    errors = []
    for planted in (False, True):
        code = CodeObject.load(ROOT / "build" / "amd-check" / f"luce-hc.{arch}.co")
        kernel = code.find("silu_scale_kernel")
        entry = kernel.descriptor.entry
        if planted:
            code.image[entry : kernel.end] = S_ENDPGM * ((kernel.end - entry) // 4)
        with FakeDevice(Planted(code)) as fake:
            errors.append(case.error(case.compute(lambda arrays: OpBench(arrays, device=device))))
            fake.check()
            assert fake.launches[0].code is code
    assert errors[0] <= case.bound_on(gpu=True) and errors[1] == np.inf


def stub_source(arch: str, folder: Path) -> CodeObject:
    """luce-qsa-mma.cu as a wrong guard would compile it: for a GPU that is not RDNA3 or 4 in the sources' eyes."""
    programs = toolchain()
    if programs is None:
        pytest.skip("no HIP compiler: make amd-check fetches one, LUCE_ROCM names one")
    ggml = ROOT / "vendor" / "src" / "ggml"
    folders = [ggml / "src" / "ggml-cuda" / "luce", ggml / "src" / "ggml-cuda", ggml / "src", ggml / "include"]
    command = [str(programs / "clang++"), *amd_check.FLAGS, "-w", f"--offload-arch={arch}"]
    command += [*(f"-D{name}" for name in amd_check.DEFINES), *(f"-I{path}" for path in folders)]
    command += [f"-U__{arch}__", "-U__GFX11__", "-U__GFX12__", "-c"]
    command += [str(folders[0] / "luce-qsa-mma.cu"), "-o", str(folder / "stub.co")]
    subprocess.run(command, check=True)
    return CodeObject.load(folder / "stub.co")


def test_a_guard_that_is_wrong_is_found(arch: str, device: str, tmp_path: Path) -> None:
    stub = stub_source(arch, tmp_path)
    case = case_of("qsa_attn", WIDE, 1)
    with FakeDevice(Planted(stub)) as fake:
        found = case.compute(lambda arrays: OpBench(arrays, device=device))
        assert any(launch.code is stub for launch in fake.launches), "the planted kernel was not reached"
        with pytest.raises((RdnaError, AssertionError)):
            fake.check()
            assert case.error(found) <= case.bound_on(gpu=True)


def test_an_empty_kernel_is_refused_at_its_launch(arch: str) -> None:
    code = CodeObject.load(ROOT / "build" / "amd-check" / f"luce-hc.{arch}.co")
    kernel = code.find("silu_scale_kernel")
    check_code(code, kernel.name, arch)
    kernel.end = kernel.descriptor.entry + 4
    with pytest.raises(StubError, match="4 bytes of code"):
        check_code(code, kernel.name, arch)
    with pytest.raises(StubError, match="no kernel of that name"):
        check_code(code, "another", arch)
