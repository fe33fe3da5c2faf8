"""A prompt on two devices, stage by stage: when each layer of each stream runs where, and what waits for what.

The order of a layer with n streams is the reference system's: R(0) C(n-1 of the layer before) S(0) R(1) C(0) S(1) ... R is the target's part up to
the router, S the transfer to the expert device, its experts and the transfer back, C the sum on the target. A device, and each direction
of the link, does one thing at a time, in the order in which it was asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds of one stream in one layer: on the target before and after, on the link each way, on the expert device."""

    before: float
    send: float
    experts: float
    back: float
    after: float


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that ran: where ("target", "send", "experts", "back"), which stream and layer, from when to when, in seconds."""

    where: str
    stream: int
    layer: int
    begin: float
    end: float


def run_pipeline(streams: Sequence[Stage], n_layer: int) -> list[Span]:
    """Everything that runs, in the order in which it was asked for. The first stream's rows come before the second's in the prompt, but a
    layer's state lets them follow each other, so nothing else orders them.
    """
    free = {"target": 0.0, "send": 0.0, "experts": 0.0, "back": 0.0}
    spans: list[Span] = []
    arrived: dict[tuple[int, int], float] = {}
    combined = dict.fromkeys(range(len(streams)), 0.0)

    def run(where: str, stream: int, layer: int, ready: float, seconds: float) -> float:
        begin = max(free[where], ready)
        free[where] = begin + seconds
        spans.append(Span(where, stream, layer, begin, free[where]))
        return free[where]

    def combine(stream: int, layer: int) -> None:
        combined[stream] = run("target", stream, layer, arrived[stream, layer], streams[stream].after)

    for layer in range(n_layer):
        for stream, stage in enumerate(streams):
            if len(streams) == 1 and layer:
                combine(0, layer - 1)
            routed = run("target", stream, layer, combined[stream], stage.before)
            other = (stream - 1, layer) if stream else (len(streams) - 1, layer - 1)
            if len(streams) > 1 and other[1] >= 0:
                combine(*other)
            sent = run("send", stream, layer, routed, stage.send)
            done = run("experts", stream, layer, sent, stage.experts)
            arrived[stream, layer] = run("back", stream, layer, done, stage.back)
    combine(len(streams) - 1, n_layer - 1)
    return spans


def seconds_of(spans: Sequence[Span]) -> float:
    """Until the last thing has ended."""
    return max(span.end for span in spans)


def busy(spans: Sequence[Span], where: str) -> float:
    """The share of the time during which something ran there."""
    return sum(span.end - span.begin for span in spans if span.where == where) / seconds_of(spans)
