"""The `luce` command."""

from __future__ import annotations
