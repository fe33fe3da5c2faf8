"""The functions that an answer may call, as a request declares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

KINDS: Final = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MAX_REFERENCES: Final = 16


@dataclass(frozen=True, slots=True)
class Function:
    """A function's name and the JSON schema of its arguments. `strict`: arguments outside the schema are of no use to the caller."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def schema_of(self, parameter: str) -> Mapping[str, Any]:
        """The schema of a parameter, a reference at its top replaced by what it refers to; empty where none is declared."""
        properties = self.parameters.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            schema = _resolve(schema["$ref"], self.parameters)
        return schema if isinstance(schema, Mapping) else {}

    def kinds(self, parameter: str) -> frozenset[str]:
        """The JSON types that the schema allows for a parameter; for one that it does not name, a string."""
        properties = self.parameters.get("properties")
        if not isinstance(properties, Mapping) or parameter not in properties:
            return frozenset({"string"})
        return _kinds(properties[parameter], self.parameters, _MAX_REFERENCES)


def read_functions(tools: Sequence[Mapping[str, Any]], field: str = "tools") -> dict[str, Function]:
    """The functions by name, from definitions `{"type": "function", "function": {"name", "parameters", ...}}`.

    Raises ValueError naming the field that is wrong.
    """
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        where = f"{field}[{index}]"
        if tool.get("type") != "function":
            raise ValueError(f"{where}.type: expected 'function', found {tool.get('type')!r}")
        definition = tool.get("function")
        if not isinstance(definition, Mapping):
            raise ValueError(f"{where}.function: expected an object, found {type(definition).__name__}")
        name = definition.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"{where}.function.name: expected a name, found {name!r}")
        if name in functions:
            raise ValueError(f"{where}.function.name: {name!r} is declared twice")
        parameters = definition.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ValueError(f"{where}.function.parameters: expected an object, found {type(parameters).__name__}")
        functions[name] = Function(name, parameters or {}, strict=definition.get("strict") is True)
    return functions


def _kinds(schema: Any, root: Mapping[str, Any], references: int) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return KINDS
    if isinstance(schema.get("$ref"), str):
        return _kinds(_resolve(schema["$ref"], root), root, references - 1) if references else KINDS
    declared = schema.get("type")
    if declared is not None:
        names = [declared] if isinstance(declared, str) else declared
        return frozenset(name for name in names if name in KINDS) or KINDS
    if "const" in schema:
        return frozenset({_kind(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_kind, schema["enum"]))
    for branches in (schema.get("anyOf"), schema.get("oneOf"), schema.get("allOf")):
        if isinstance(branches, list) and branches and references:
            return frozenset().union(*(_kinds(branch, root, references - 1) for branch in branches))
    return KINDS


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference inside the schema (`#/$defs/Color`) points to; None when there is no such place."""
    if not reference.startswith("#"):
        return None
    value: Any = root
    for key in reference[1:].split("/")[1:]:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key.replace("~1", "/").replace("~0", "~"))
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) else "number"
    return "string" if isinstance(value, str) else "object" if isinstance(value, Mapping) else "array"
