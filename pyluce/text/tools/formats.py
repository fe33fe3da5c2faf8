"""Which format a model writes its calls in: its chat template shows it one."""

from __future__ import annotations

from pyluce.text.tools import json_calls, xml_calls
from pyluce.text.tools.protocols import ToolFormat


def detect_format(template: str) -> ToolFormat | None:
    """The format that the source of a chat template shows, or None when it shows none of those known."""
    if xml_calls.FUNCTION in template and xml_calls.PARAMETER in template:
        return xml_calls.XmlCalls()
    if json_calls.OPENING in template and "arguments" in template:
        return json_calls.JsonCalls(text_arguments="arguments is string" in template)
    return None
