"""Grammars of answers that are tool calls and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pyluce.text.schema import SchemaError, grammar, schema_rule
from pyluce.text.tools.functions import Function


class _Rules(Protocol):
    def rules(self, function: Function, number: int) -> Sequence[str]: ...


def tool_grammar(format: _Rules, functions: Mapping[str, Function], *, many: bool, field: str = "tools") -> str:
    """A grammar of answers that call one of `functions`, or with `many` one after another, a call a line at least.

    Arguments keep to their schema where it can be kept to; where it cannot, and the function is not strict, they are any object.
    Raises SchemaError naming a strict function's keyword that cannot be kept to.
    """
    if not functions:
        raise SchemaError(f"{field}: expected at least one function to call, found none")
    call = " | ".join(f"call_{number}" for number in range(len(functions)))
    rules = ['start: call ("\\n" call)*' if many else "start: call", f"call: {call}"]
    for number, function in enumerate(functions.values()):
        rules += format.rules(function, number)
    return grammar(rules, field)


def arguments_rule(function: Function) -> str:
    """The right side of a rule for a function's arguments as one JSON object."""
    parameters = {"type": "object", **function.parameters}
    return value_rule(function, parameters, f"{function.name}.parameters", {"type": "object"})


def value_rule(function: Function, schema: Any, field: str, otherwise: Any) -> str:
    """The right side of a rule for a JSON value of `schema`, or for any of `otherwise` where the schema is too much and nobody insists."""
    try:
        return schema_rule(schema, field)
    except SchemaError:
        if function.strict:
            raise
        return schema_rule(otherwise, field)
