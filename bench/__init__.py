"""Measurements that docs/measurements.md records, each with the command that repeats it."""

from __future__ import annotations
