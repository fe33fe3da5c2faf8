"""The status page: one HTML file, with a content security policy that lets only its own style and script run."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from starlette.responses import HTMLResponse

_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


@cache
def page_text() -> str:
    """The page. It is part of the package, so that it is always there."""
    return (resources.files("pyluce.server") / "static" / "index.html").read_text(encoding="utf-8")


@cache
def page_headers() -> dict[str, str]:
    """The page may load nothing from elsewhere, talk to this server only, and be framed by nobody."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}
    for kind, body in _INLINE.findall(page_text()):
        hashes[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'")
    policy = [
        "default-src 'none'",
        *(f"{kind}-src {' '.join(values)}" for kind, values in hashes.items()),
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def page_response() -> HTMLResponse:
    """The answer to GET /."""
    return HTMLResponse(page_text(), headers=page_headers())
