"""Turns pydantic's findings into one sentence: the field, what was expected, what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_KINDS = (
    (bool, "a boolean"),
    (str, "a string"),
    (int, "an integer"),
    (float, "a number"),
    (Mapping, "an object"),
    (Sequence, "a list"),
)
_ARTICLES = (
    ("a valid dictionary", "an object"),
    ("a valid list", "a list"),
    ("a valid string", "a string"),
    ("a valid number", "a number"),
    ("a valid integer", "an integer"),
    ("a valid boolean", "true or false"),
    ("None", "null"),
)
_SHOWN = 80


def describe(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[str, str | None]:
    """The message of the first field that is wrong, and that field's path such as `messages[0].content`.

    Where the branches of a union disagree, the branch that got deepest into the data is the one that was meant.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return f"body: expected JSON, found an error at character {first['loc'][-1]}: {first['ctx']['error']}", None
    located = [(_resolve(error, body), error) for error in errors]
    top = located[0][0][:1]
    group = [item for item in located if item[0][:1] == top]
    deepest = max((path for path, _ in group), key=len)
    chosen = [error for path, error in group if path == deepest]
    field = _spell(deepest)
    where = field or "body"
    kind = chosen[0]["type"]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _describe_tag(chosen[0], where)
    if kind == "missing":
        return f"{where}: required, but missing", field
    if kind == "extra_forbidden":
        return f"{where}: unknown field, found {_found(chosen[0]['input'])}", field
    expected = " or ".join(dict.fromkeys(_expected(error) for error in chosen))
    return f"{where}: expected {expected}, found {_found(chosen[0]['input'])}", field


def _resolve(error: Mapping[str, Any], body: Any) -> tuple[str | int, ...]:
    """The error's path in the body, without the names of union branches that pydantic puts in between."""
    location = list(error["loc"])
    if location and location[0] in ("body", "query", "path", "header"):
        location = location[1:]
    value = body
    path: list[str | int] = []
    for index, key in enumerate(location):
        last_is_missing = error["type"] == "missing" and index == len(location) - 1
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and isinstance(key, int) and -len(value) <= key < len(value):
            value = value[key]
        elif not last_is_missing:
            continue
        path.append(key)
    return tuple(path)


def _describe_tag(error: Mapping[str, Any], where: str) -> tuple[str, str]:
    """A union's branch is chosen by one of its fields, which is missing or names no branch."""
    context = error["ctx"]
    field = f"{where}.{str(context['discriminator']).strip(chr(39))}"
    if error["type"] == "union_tag_not_found":
        return f"{field}: required, but missing", field
    return f"{field}: expected {context['expected_tags']}, found {_found(context['tag'])}", field


def _spell(path: Sequence[str | int]) -> str | None:
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text or None


def _expected(error: Mapping[str, Any]) -> str:
    message: str = error["msg"]
    message = message.removeprefix("Value error, ").removeprefix("Input should be ").removeprefix("Input should ")
    for theirs, ours in _ARTICLES:
        if message == theirs or message.startswith(f"{theirs} "):
            return ours
    return "an object" if error["type"].startswith("model_") else message.removeprefix("expected ")


def _found(value: object) -> str:
    """The value where it is short, its kind otherwise."""
    if value is None:
        return "null"
    if isinstance(value, (bool, int, float)):
        return str(value).lower() if isinstance(value, bool) else repr(value)[:_SHOWN]
    if isinstance(value, str) and len(value) <= _SHOWN:
        return repr(value)
    return next((name for kind, name in _KINDS if isinstance(value, kind)), type(value).__name__)
