"""Row steps that are launched early: while one computes, the next of the same shape is put behind it, with a gate in between.

A GPU needs about 0.2 ms to start a graph of a few hundred launches, and has nothing to do meanwhile. So when steps repeat, the next one
is launched before its tokens are known. Its inputs are copied behind the gate: until that opens they are padding, rows that belong to no
sequence and change no state, then those of the step. When another step comes instead, the gate is opened over the padding, and what
was launched early costs the time of a step and nothing else. So it does when the gate opens by itself, because nobody came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from pyluce.graph.trunk import StepGraph

REPEATS: Final = 4
"""Steps of one shape in a row before the next is launched early: by then its graph is captured, so that nothing is allocated."""


class Gate(Protocol):
    """`pyluce.native.gate.StreamGate`."""

    def shut(self) -> bool:
        """What is started from now on waits; False when that cannot be had."""

    def claim(self) -> bool:
        """It stays shut until `open`; False: it has opened by itself."""

    def open(self) -> None:
        """What waits goes on."""


class EarlyStep:
    """At most one step at a time. `launched` counts those that were put behind the gate, `used` those that became a step."""

    def __init__(self, gate: Gate, pad: Callable[[StepGraph], None], launch: Callable[[StepGraph], None]) -> None:
        """pad(graph): write padding into the inputs that its next step will have. launch(graph): send them and start it."""
        self._gate = gate
        self._pad = pad
        self._launch = launch
        self._waiting: StepGraph | None = None
        self._last: StepGraph | None = None
        self._repeats = 0
        self.launched = 0
        self.used = 0

    def claim(self, graph: StepGraph) -> bool:
        """The next step is of this graph. True: it is behind the gate, which `go` opens once its inputs are written."""
        if graph is not self._last:
            self.drop()
        if self._waiting is None:
            return False
        self._waiting = None
        if self._gate.claim():
            return True
        self._repeats = 0
        return False

    def go(self) -> None:
        """Open the gate that was claimed: the inputs of the step are written."""
        self.used += 1
        self._gate.open()

    def give_up(self, graph: StepGraph) -> None:
        """Open the gate that was claimed over padding again: the inputs could not be written."""
        try:
            self._pad(graph)
        finally:
            self._gate.open()

    def hold(self) -> bool:
        """What the last step computed stays as it is until `drop`. False: a step of padding may have written over it."""
        return self._waiting is None or self._gate.claim()

    def launch_next(self, graph: StepGraph) -> None:
        """A step of this graph was started. Put one like it behind it if that is what came lately."""
        self._repeats = self._repeats + 1 if graph is self._last else 0
        self._last = graph
        if self._repeats < REPEATS:
            return
        self._pad(graph)
        if not self._gate.shut():
            self._repeats = 0
            return
        self._waiting = graph
        self.launched += 1
        try:
            self._launch(graph)
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Another step comes: what waits goes on as padding, and before anything that is started from now on."""
        self._last = None
        self._repeats = 0
        if self._waiting is not None:
            self._waiting = None
            self._gate.open()
