"""The status page without a browser: it is whole, it names what it uses, and its policy lets only itself run."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import httpx

from pyluce.server.page import page_text

VOID = {"meta", "link", "input", "br", "img", "hr"}
OUTSIDE = re.compile(r"(?:https?:)?//[\w.-]+\.\w+")
SVG_NAMESPACE = "http://www.w3.org/2000/svg"


class Structure(HTMLParser):
    """Notes ids and references, and refuses tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.fields: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        values = dict(attrs)
        self.attributes += [(name, value or "") for name, value in attrs]
        if values.get("id"):
            self.ids.append(values["id"] or "")
        self.references += (values.get("aria-labelledby") or "").split()
        if tag in ("input", "textarea", "select", "button"):
            self.fields.append(values)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else, at {self.getpos()}"


def structure() -> Structure:
    found = Structure()
    found.feed(page_text())
    found.close()
    return found


def script() -> str:
    found = re.search(r"<script>(.*?)</script>", page_text(), re.DOTALL)
    assert found
    return found[1]


def test_the_page_is_well_formed_and_names_are_unique() -> None:
    found = structure()
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    assert set(found.references) <= set(found.ids)


def test_every_element_that_the_script_uses_is_there() -> None:
    ids = set(structure().ids)
    plain = set(re.findall(r'\$\("([\w-]+)"\)', script()))
    assert len(plain) > 20
    assert plain <= ids
    for prefix, suffix in re.findall(r"\$\(`([\w-]*)\$\{\w+\}([\w-]*)`\)", script()):
        assert any(name.startswith(prefix) and name.endswith(suffix) for name in ids), (prefix, suffix)


def test_text_can_only_become_text() -> None:
    assert not re.search(
        r"innerHTML\s*[=+]|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc|DOMParser",
        script(),
    )
    assert not [name for name, _ in structure().attributes if name.startswith("on") or name == "style"]
    assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", script())


def test_nothing_comes_from_elsewhere() -> None:
    assert OUTSIDE.findall(page_text().replace(SVG_NAMESPACE, "")) == []
    assert not [value for name, value in structure().attributes if name == "src"]


def test_it_is_served_with_a_policy_for_exactly_its_own_code(client: httpx.Client) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.text == page_text()
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    assert policy["script-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_the_page_reads_the_fields_that_the_server_sends(client: httpx.Client) -> None:
    status = client.get("/status/json").json()
    for path in re.findall(r"\bstatus\.(\w+(?:\.\w+)*)", script()):
        value = status
        for name in path.split("."):
            if isinstance(value, dict) and not (isinstance(value, dict) and name in ("length",) and name not in value):
                assert name in value, f"status.{path}"
                value = value[name]
    for name in re.findall(r"\bslot\.(\w+)", script()):
        assert name in status["slots"][0] or name == "text", f"slot.{name}"
    for name in re.findall(r"\btotals\.(\w+)", script()):
        assert name in status["totals"], f"totals.{name}"
