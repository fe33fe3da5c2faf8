"""`python -m tests.support.fake_cli ARGUMENTS`: the luce command over the fake model, for tests that need a process.

LUCE_FAKE_ANSWER is what the model answers (its end token follows); without it answers are hashes. LUCE_FAKE_STEP_S slows a step.
LUCE_FAKE_ECHO=1: the echo model of echo_service.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli.main import main
from pyluce.luce import Luce, Progress
from pyluce.options import LoadOptions
from pyluce.service import LuceService
from tests.support.fake_luce import fake_luce
from tests.support.fake_vocabulary import FakeVocabulary


def scripted(text: str, delay_s: float = 0.0) -> Callable[[list[int]], int]:
    """A script for FakeRunner: the bytes of `text` after the prompt, then the end token."""
    answer = [*text.encode(), FakeVocabulary().token("<|im_end|>")]
    begin: list[int] = []

    def script(tokens: list[int]) -> int:
        time.sleep(delay_s)
        if not begin:
            begin.append(len(tokens))
        return answer[min(len(tokens) - begin[0], len(answer) - 1)]

    return script


def load_fake(path: Path | None, options: LoadOptions, progress: Progress | None = None) -> Luce:
    """Stands in for `Luce.load_with`."""
    if progress is not None:
        for done in range(3):
            progress("weights", done, 2)
    answer = os.environ.get("LUCE_FAKE_ANSWER")
    runner: dict[str, Any] = {}
    if answer is not None:
        runner["script"] = scripted(answer, float(os.environ.get("LUCE_FAKE_STEP_S", "0")))
    if os.environ.get("LUCE_FAKE_ECHO") == "1":
        from tests.support.echo_service import Echo

        echo = Echo(FakeVocabulary())
        runner = {"script": echo.choose, "damage": echo.damage, "vocabulary": echo.vocabulary}
    return fake_luce(options, **runner)


if __name__ == "__main__":
    Luce.load_with = load_fake  # type: ignore[method-assign, assignment]
    LuceService._open_file = lambda self: FakeVocabulary()  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
