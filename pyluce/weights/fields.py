"""Typed access to metadata: every value is checked for type and range, every complaint names its key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from pyluce.weights.errors import refuse
from pyluce.weights.gguf_reader import GgufArray, MetaValue

RECONVERT = "The file was damaged or written by a converter that does not know this model: convert it again"


class Fields:
    """The metadata of one model under an architecture prefix (`qwen4exp.`)."""

    def __init__(self, metadata: Mapping[str, MetaValue], path: str, prefix: str) -> None:
        self.metadata = metadata
        self.path = path
        self.prefix = prefix
        self.used: set[str] = set()

    def refuse(self, key: str, expected: object, found: object, hint: str = RECONVERT) -> NoReturn:
        refuse(self.path, self.prefix + key, expected=expected, found=found, hint=hint)

    def get(self, key: str) -> MetaValue | None:
        self.used.add(self.prefix + key)
        return self.metadata.get(self.prefix + key)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def unused(self) -> list[str]:
        """Keys under the prefix that nobody asked for."""
        return sorted(k for k in self.metadata if k.startswith(self.prefix) and k not in self.used)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]; without a default the key must be there."""
        value = self.get(key)
        wanted = f"an integer from {low} to {high}"
        if value is None:
            if default is None:
                self.refuse(key, wanted, "no such key")
            return default
        return self._integer(key, value, low, high, wanted)

    def _integer(self, key: str, value: object, low: int, high: int, wanted: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(key, wanted, value if not isinstance(value, str) else repr(value[:60]))
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite floating-point number in [low, high] (an integer in its place is a sign of damage)."""
        value = self.get(key)
        wanted = f"a float from {low:g} to {high:g}"
        if value is None:
            if default is None:
                self.refuse(key, wanted, "no such key")
            return default
        if not isinstance(value, float) or not math.isfinite(value) or not low <= value <= high:
            self.refuse(key, wanted, value if not isinstance(value, str) else repr(value[:60]))
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.refuse(key, "text", value)
        return value

    def integers(self, key: str, length: int, low: int, high: int, optional: bool = False) -> tuple[int, ...] | None:
        """An array of exactly `length` integers (or booleans) in [low, high]; None if it is optional and absent."""
        value = self.get(key)
        wanted = f"an array of {length} integers from {low} to {high}"
        if value is None:
            if not optional:
                self.refuse(key, wanted, "no such key")
            return None
        if not isinstance(value, GgufArray) or value.length != length or value.kind in ("string", "f32", "f64"):
            self.refuse(key, wanted, value)
        numbers = tuple(int(x) for x in np.asarray(value.numbers()).tolist())
        for i, number in enumerate(numbers):
            if not low <= number <= high:
                self.refuse(key, wanted, f"{number} at index {i}")
        return numbers

    def per_layer(self, key: str, n_layers: int, low: int, high: int, optional: bool = False) -> tuple[int, ...] | None:
        """One value a layer: an array of `n_layers`, or one integer that holds for all of them."""
        value = self.get(key)
        if value is not None and not isinstance(value, GgufArray):
            wanted = f"an integer from {low} to {high}, or {n_layers} of them"
            return (self._integer(key, value, low, high, wanted),) * n_layers
        return self.integers(key, n_layers, low, high, optional)

    def uniform(
        self, key: str, n_layers: int, low: int, high: int, layers: list[int], default: int | None = None
    ) -> int:
        """Like `per_layer`, for a value that must be the same in `layers` (other layers may say 0)."""
        values = self.per_layer(key, n_layers, 0, high, optional=default is not None)
        if values is None:
            assert default is not None
            return default
        wanted = values[layers[0]]
        for i, value in enumerate(values):
            if i in layers and value < low:
                self.refuse(key, f"an integer from {low} to {high} for layer {i}", value)
            if value != wanted and not (value == 0 and i not in layers):
                self.refuse(key, f"one value for all layers ({wanted})", f"{value} at layer {i}")
        return wanted
