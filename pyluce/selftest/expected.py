"""Which kernel a device must take: that results are right is not enough, as a slow kernel's are, too.

A device that no rule names may take what it likes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pyluce.native.devices import cpu_features, list_devices

CPU: Final = "cpu.*"
AVX2: Final = r"cpu.* AVX2 .*"
GPU: Final = r"compute capability .*|gfx.*"
MATRIX_UNITS: Final = r"compute capability (7\.5|[89]\.\d|1\d\.\d)|gfx11\d\d|gfx12\d\d"
HOPPER: Final = r"compute capability 9\.0"


@dataclass(frozen=True, slots=True)
class Rule:
    """Patterns of whole texts: a device (`describe_device`), an op, a shape, and a kernel that must be among those that ran."""

    device: str
    op: str
    shape: str
    kernel: str


RULES: Final = (
    Rule(AVX2, r"mul_mat Q8_0 row", r".*", r"row tiles"),
    Rule(CPU, r"mul_mat \w+ chunk repacked", r".*", r"repacked gemm"),
    Rule(CPU, r".* repacked", r".*", r"repacked gem[mv]"),
    Rule(MATRIX_UNITS, r"qsa_attn", r"float16 K/V, \d+/\d+ heads of 256, .*", r"mma"),
    Rule(GPU, r"qsa_attn", r"float32 .*", r"scalar f32"),
    Rule(HOPPER, r"gdn", r".* heads of 128", r"rows in clusters"),
    Rule(GPU, r"gdn", r".*", r"chunk scan"),
    Rule(HOPPER, r"mul_mat Q8_0 row", r"2560x640", r"row lean"),
    Rule(HOPPER, r"mul_mat IQ4_NL row", r"2560x640", r"row ring"),
    Rule(HOPPER, r"mul_mat_id (Q8_0|IQ4_NL) row", r"2560x16x512 .*", r"row ring"),
    Rule(GPU, r"mul_mat F32 chunk", r".*", r"chunk dense of two terms"),
    Rule(GPU, r"mul_mat (Q|IQ|F16|BF16).* chunk", r".*", r"chunk (dense of widened|tile.*)"),
    Rule(GPU, r"mul_mat_id F32 chunk", r".*", r"chunk f32 experts"),
    Rule(GPU, r"mul_mat_id (Q|IQ|F16|BF16).* chunk", r".*", r"chunk tile.*"),
)


def describe_device(device: str) -> str:
    """What rules know a device by: a GPU's architecture, or `cpu` with the features that ggml uses, each with a space around it."""
    if device == "cpu":
        return " ".join(["cpu", *(name for name, value in cpu_features().items() if value == "1"), ""])
    return next((info.architecture for info in list_devices() if info.device == device and info.architecture), "")


def missing_kernels(description: str, op: str, shape: str, paths: Sequence[str]) -> list[str]:
    """The kernels that a device must take for a test, and that are not among `paths`."""
    return [
        rule.kernel
        for rule in RULES
        if re.fullmatch(rule.device, description)
        and re.fullmatch(rule.op, op)
        and re.fullmatch(rule.shape, shape)
        and not any(re.fullmatch(rule.kernel, path) for path in paths)
    ]
