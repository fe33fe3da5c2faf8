"""The live panel: the status page's facts, drawn with rich for the size of the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import ConsoleDimensions, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
_HEALTH = {
    "ok": ("ready", "green"),
    "busy": ("working", "yellow"),
    "parked": ("parked", "cyan"),
    "stalled": ("stalled", "red"),
    "failed": ("engine ended", "red"),
}
_STATES = {"free": "dim", "prefill": "bright_blue", "decode": "yellow"}
_BAR_WIDTH = 20
_NARROW = 90
_LINES_AROUND_SLOTS = 13


class StatusPanel:
    """Draws one status after another."""

    def __init__(self, url: str) -> None:
        self._url = url

    def render(
        self,
        shown: Mapping[str, Any],
        history: Sequence[float],
        size: ConsoleDimensions,
        *,
        stopping: bool = False,
        memory: Sequence[RenderableType] | None = None,
        footer: str | None = None,
    ) -> RenderableType:
        """`shown`: as /status/json has it. `history`: generated tokens a second, oldest first.

        `memory`, `footer`: shown in place of the line about memory, and of the one about Ctrl-C.
        """
        last = _footer(shown, stopping) if footer is None else footer
        rows: list[RenderableType] = [
            self._heading(shown),
            Text(""),
            _rates(shown["rates"], history, size.width - 48),
            Text(""),
            _slots(shown["slots"], shown["n_ctx"], max(3, size.height - _LINES_AROUND_SLOTS), size.width < _NARROW),
            Text(""),
            _requests(shown),
            _tokens(shown["totals"]),
            *([_memory(shown["memory"])] if memory is None else memory),
            Text(last, style="bold red" if stopping else "dim"),
        ]
        return Panel(Group(*rows), title="luce", title_align="left", border_style="yellow")

    def _heading(self, shown: Mapping[str, Any]) -> RenderableType:
        word, style = _HEALTH.get(shown["health"]["status"], (shown["health"]["status"], "red"))
        line = Table.grid(expand=True)
        line.add_column(no_wrap=True, overflow="ellipsis")
        line.add_column(justify="right", no_wrap=True)
        name = Text.assemble((shown["model"], "bold"), "  ", (self._url, "underline cyan"))
        line.add_row(name, Text(f"{word}, up {span(shown['uptime_s'])}", style=style))
        return line


def sparkline(values: Iterable[float], width: int) -> str:
    """The last `width` values as bars, the largest one highest."""
    last = list(values)[-max(1, width) :]
    top = max(last, default=0.0)
    return "".join(BARS[min(len(BARS) - 1, int(value / top * len(BARS)))] if top > 0.0 else BARS[0] for value in last)


def size_text(count: float) -> str:
    """A number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def rate(value: float) -> str:
    """Tokens a second."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def span(seconds: float) -> str:
    """A time in its two largest units."""
    whole = int(seconds)
    for size, unit, below, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // below} {name}"
    return f"{whole} s"


def byte_counts(report: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, float]]:
    """The byte counts of a nested report by their names; sums of others and limits are left out."""
    if isinstance(report, Mapping):
        for name, value in report.items():
            yield from byte_counts(value, (*path, str(name)))
    elif path and path[-1].endswith("_bytes") and not path[-1].startswith(("total_", "budget_")):
        yield " ".join(path).removesuffix("_bytes").removesuffix(" n").replace("_", " "), float(report)


def _rates(rates: Mapping[str, float], history: Sequence[float], width: int) -> RenderableType:
    return Text.assemble(
        (rate(rates["generated_tokens_per_second"]), "bold yellow"),
        (" tok/s generated  ", "dim"),
        (sparkline(history, max(8, width)).rjust(max(8, width)), "yellow"),
        (f"  {rate(rates['prompt_tokens_per_second'])}", "bold bright_blue"),
        (" prompt", "dim"),
    )


def _slots(slots: Sequence[Mapping[str, Any]], context: int, lines: int, narrow: bool) -> RenderableType:
    table = Table.grid(padding=(0, 1 if narrow else 2))
    shown = list(slots)
    if len(shown) > lines:
        shown = [slot for slot in slots if slot["state"] != "free"][: lines - 1]
    for slot in shown:
        table.add_row(*_slot(slot, context, narrow))
    rest = len(slots) - len(shown)
    if rest:
        busy = sum(slot["state"] != "free" for slot in slots) - sum(slot["state"] != "free" for slot in shown)
        more = f"{busy} more busy, {rest - busy} free" if busy else f"{rest} free"
        table.add_row("", Text(more, style="dim"))
    return table


def _slot(slot: Mapping[str, Any], context: int, narrow: bool) -> list[RenderableType]:
    state = slot["state"]
    style = _STATES.get(state, "")
    head: list[RenderableType] = [Text(str(slot["slot"]), style="dim"), Text(state, style=style)]
    if state == "free":
        return head
    prefill = state == "prefill"
    done = slot["prompt_done"] if prefill else slot["prompt_total"] + slot["generated"]
    total = max(1, slot["prompt_total"] if prefill else context)
    width = _BAR_WIDTH // 2 if narrow else _BAR_WIDTH
    bar = ProgressBar(total, min(done, total), width=width, complete_style=style, finished_style=style)
    amount = (
        f"{slot['prompt_done']:,} of {slot['prompt_total']:,} tokens" if prefill else f"{slot['generated']:,} tokens"
    )
    speed = "" if prefill else f"{rate(slot['tokens_per_second'])} tok/s"
    if not narrow:
        head.append(Text(f"request {slot['request_id']}", style="dim"))
    return [*head, bar, Text(amount), Text(speed)]


def _requests(shown: Mapping[str, Any]) -> RenderableType:
    totals = shown["totals"]
    parts = [f"{count:,} {outcome}" for outcome, count in totals["requests"].items() if count] or ["none answered yet"]
    if totals["refused"]:
        parts.append(f"{totals['refused']:,} refused")
    return Text.assemble(
        ("queue ", "dim"),
        f"{shown['queue']['length']} of {shown['queue']['limit']}",
        ("   requests ", "dim"),
        ", ".join(parts),
    )


def _tokens(totals: Mapping[str, Any]) -> RenderableType:
    text = Text("tokens ", style="dim")
    counts = f"{totals['prompt_tokens']:,} in, {totals['cached_prompt_tokens']:,} from the cache, {totals['generated_tokens']:,} out"
    text.append(counts, style="not dim")
    if totals["invariant_violations"]:
        text.append(f"   {totals['invariant_violations']:,} self-check failures", style="bold red")
    return text


def _memory(report: Any) -> RenderableType:
    counts = sorted(byte_counts(report), key=lambda item: -item[1])
    text = Text("memory ", style="dim", no_wrap=True, overflow="ellipsis")
    text.append(
        ", ".join(f"{name} {size_text(count)}" for name, count in counts if count) or "unknown", style="not dim"
    )
    return text


def _footer(shown: Mapping[str, Any], stopping: bool) -> str:
    if not stopping:
        return "Ctrl-C stops the server"
    busy = shown["health"]["busy_slots"] + shown["queue"]["length"]
    return f"stopping: {busy} requests are still running; Ctrl-C again ends them now"
