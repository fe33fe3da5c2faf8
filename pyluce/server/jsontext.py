"""JSON as this server writes it: one line of ASCII, so that no character can break a frame, a line or an encoding."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


def to_json(value: Any) -> str:
    """`value` as JSON. Everything outside ASCII is escaped: U+2028, U+0085 and lone surrogates are safe wherever text is split into lines.

    Raises ValueError for a number that JSON does not have (NaN, infinity).
    """
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


class JsonResponse(Response):
    """A response with a JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content).encode("ascii")
