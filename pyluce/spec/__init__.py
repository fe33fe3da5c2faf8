"""Speculation: where drafts come from, how many are worth verifying, and what came of them. Pure Python: no ctypes, no ggml.

Nothing here can change what an answer is: a draft that is not what the request's own sampler chooses is thrown away.
"""

from __future__ import annotations

from pyluce.spec.options import MAX_DRAFTS, MAX_WIDTH, SpecOptions
from pyluce.spec.stats import SpecStats

__all__ = ["MAX_DRAFTS", "MAX_WIDTH", "SpecOptions", "SpecStats"]
