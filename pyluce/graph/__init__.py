"""The model as graphs over the patched ggml:

op vocabulary, blocks, trunk, and the runner that keeps and replays them.
"""

from __future__ import annotations

from pyluce.graph.options import RunnerOptions
from pyluce.graph.runner import TrunkRunner

__all__ = ["RunnerOptions", "TrunkRunner"]
