"""Files that need not outlive a power cut."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import it where cache folders are tested: waiting for a busy disk shows nothing that a test could see."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
