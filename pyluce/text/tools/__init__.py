"""Tool calls in a model's answer: finds them, and streams their names and arguments."""

from __future__ import annotations

from pyluce.text.tools.events import CallArguments, CallEnd, CallStart, ToolEvent, ToolText
from pyluce.text.tools.formats import detect_format
from pyluce.text.tools.functions import Function, read_functions
from pyluce.text.tools.grammar import tool_grammar
from pyluce.text.tools.protocols import ToolFormat
from pyluce.text.tools.stream import ToolStream, join_events

__all__ = [
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Function",
    "ToolEvent",
    "ToolFormat",
    "ToolStream",
    "ToolText",
    "detect_format",
    "join_events",
    "read_functions",
    "tool_grammar",
]
