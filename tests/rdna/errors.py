"""What stops a run."""

from __future__ import annotations


class RdnaError(Exception):
    """The code object, the dispatch or an instruction cannot be run; the text says where and why."""


class UnknownInstruction(RdnaError):
    """An encoding, a form or a meaning that the interpreter has not got. Nothing is guessed."""


class OutOfBounds(RdnaError):
    """A read or write outside every buffer, outside the workgroup's LDS or outside a lane's scratch."""


class RaceError(RdnaError):
    """Two waves of a workgroup touched the same bytes between two barriers, at least one of them writing."""
