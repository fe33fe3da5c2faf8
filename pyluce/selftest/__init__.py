"""What `luce doctor --selftest` runs: every op kind and every weight type on a device, against formulas in float64."""

from __future__ import annotations
