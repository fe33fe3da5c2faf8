"""The parts of ``build.py``: the source tree, unified diffs, the compiler run. Standard library only."""

from __future__ import annotations
