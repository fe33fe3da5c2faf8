"""Every example in docs/library.md runs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from pyluce.engine import SamplingParams
from pyluce.luce import Luce
from pyluce.options import LoadOptions
from pyluce.prompts import PromptBuilder
from tests.support.fake_luce import fake_luce

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "library.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Luce, "load_with", lambda path, options, progress=None: fake_luce(LoadOptions()))
    namespace: dict[str, Any] = {}
    exec(compile(EXAMPLES[number], f"{DOCUMENT.name} example {number}", "exec"), namespace)


def test_there_are_examples_and_every_request_argument_is_documented() -> None:
    assert len(EXAMPLES) >= 4
    text = DOCUMENT.read_text(encoding="utf-8")
    names = set(inspect.signature(PromptBuilder.build).parameters) - {"self", "chat", "sampling_fields"}
    for name in names | set(SamplingParams.__dataclass_fields__):
        assert f"`{name}`" in text or f"`{name}=" in text, f"{DOCUMENT} says nothing about the argument {name}"
