"""The one exception of this package."""

from __future__ import annotations

from typing import NoReturn


class ModelError(ValueError):
    """A model file cannot be used: the message says what was expected, what was found and what to do."""


def refuse(where: object, what: str, *, expected: object, found: object, hint: str = "") -> NoReturn:
    """Raise a `ModelError` of the form `where: what: expected ..., found .... Hint.`"""
    message = f"{where}: {what}: expected {expected}, found {found}"
    raise ModelError(f"{message}. {hint}" if hint else message)
