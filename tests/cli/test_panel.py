"""The live panel: the status page's facts, for any size of terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from cli.panel import StatusPanel, byte_counts, size_text, span, sparkline


def slot(index: int, state: str, **more: int | float) -> dict[str, Any]:
    return {"slot": index, "state": state, "request_id": 10 + index, "prompt_done": 0, "prompt_total": 0, "generated": 0,
            "tokens_per_second": 0.0, **more}  # fmt: skip


def shown(slots: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "model": "a model",
        "n_ctx": 1000,
        "uptime_s": 3725.0,
        "health": {"status": "busy", "busy_slots": sum(one["state"] != "free" for one in slots)},
        "slots": slots,
        "queue": {"length": 3, "limit": 16},
        "rates": {"generated_tokens_per_second": 12.34, "prompt_tokens_per_second": 2345.6},
        "totals": {
            "requests": {"stop": 12, "length": 3, "cancelled": 0, "deadline": 0, "failed": 1},
            "refused": 2,
            "prompt_tokens": 123456,
            "cached_prompt_tokens": 77,
            "generated_tokens": 789,
            "invariant_violations": 0,
        },
        "memory": {"weights": {"mapped_bytes": 3 << 30}, "state": {"kv_bytes": 1 << 20, "total_bytes": 9 << 20}},
        **more,
    }


def draw(status: dict[str, Any], width: int = 100, height: int = 40, *, stopping: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, legacy_windows=False)
    console.print(StatusPanel("http://127.0.0.1:8080").render(status, [1.0, 2.0, 3.0], console.size, stopping=stopping))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


BUSY = [slot(0, "decode", prompt_total=20, generated=1500, tokens_per_second=33.3),
        slot(1, "prefill", prompt_done=512, prompt_total=4096), slot(2, "free")]  # fmt: skip


def test_every_fact_is_there() -> None:
    text = draw(shown(BUSY))
    for fact in (
        "a model", "http://127.0.0.1:8080", "working, up 1 h 2 min", "12.3 tok/s generated", "2,346 prompt", "request 10",
        "1,500 tokens", "33.3 tok/s", "512 of 4,096 tokens", "2  free", "queue 3 of 16", "12 stop, 3 length, 1 failed, 2 refused",
        "123,456 in, 77 from the cache, 789 out", "weights mapped 3.0 GiB, state kv 1.0 MiB", "Ctrl-C stops the server",
    ):  # fmt: skip
        assert fact in text, fact
    assert "self-check" not in text
    assert "total" not in text, "a sum is not a place"


def test_trouble_is_told() -> None:
    status = shown(BUSY)
    status["totals"]["invariant_violations"] = 2
    status["health"] = {"status": "stalled", "busy_slots": 2}
    text = draw(status, stopping=True)
    assert "2 self-check failures" in text
    assert "stalled" in text
    assert "stopping: 5 requests are still running" in text


@pytest.mark.parametrize(("width", "height"), [(60, 18), (80, 24), (200, 60)])
def test_many_slots_fit_the_terminal(width: int, height: int) -> None:
    slots = [slot(i, "decode" if i < 40 else "free", generated=5) for i in range(64)]
    lines = draw(shown(slots), width, height).splitlines()
    assert len(lines) < height
    assert max(len(line) for line in lines) <= width
    assert any("free" in line and "more busy" in line for line in lines) or height == 60
    assert "24 free" in "\n".join(lines)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (7260, "2 h 1 min"), (90000, "1 d 1 h")]
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_sizes_and_lines() -> None:
    assert [size_text(value) for value in (0, 1023, 1536, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "5.0 TiB"]
    assert sparkline([], 5) == ""
    assert sparkline([0, 0], 5) == "▁▁"
    assert sparkline([0, 4, 8], 2) == "▅█"
    assert dict(byte_counts({"a": {"b_bytes": 1, "n": 2, "total_bytes": 3}, "c_bytes": 4})) == {"a b": 1.0, "c": 4.0}
