"""No instruction of our kernels, nor of the upstream kernels that check the interpreter, is unknown to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rdna.mnemonics import inside, survey

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build" / "fakehip" / "bin" / "libggml-hip.so"


def test_every_instruction_of_the_library_is_known() -> None:
    if not LIBRARY.is_file():
        pytest.skip("needs the libraries of `make amd-run`")
    counts, unknown = survey(inside(LIBRARY))
    assert not unknown, "\n".join(unknown.values())
    assert {arch for arch, _, _ in counts} == {"rdna3", "rdna4"}
    assert len(counts) > 500
