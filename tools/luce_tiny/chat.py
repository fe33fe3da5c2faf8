"""Rendering of conversations with the template that travels in the GGUF."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")


@cache
def _template() -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE_PATH.read_text())


def render(messages: list[dict[str, Any]], **switches: Any) -> str:
    """The text of a conversation; switches as in the template (tools, enable_thinking, ...)."""
    return _template().render(messages=messages, **switches)
