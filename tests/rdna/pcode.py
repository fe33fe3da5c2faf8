"""AMD's pseudocode of an opcode, compiled to a Python function over numpy arrays.

The subset: assignments, bit slices, if and elsif (both sides are computed and selected lane by lane), loops with
constant bounds (unrolled), casts, and the functions in ``arithmetic``. Text outside it raises UnknownInstruction, and
the opcode then needs a meaning written by hand (``overrides``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.rdna import arithmetic
from tests.rdna.errors import UnknownInstruction

TOKEN = re.compile(
    r"\s*(?:(?P<cast>\d+'[UIFB](?=\s*\())|(?P<typed>\d+'(?:0x[0-9a-fA-F]+|\d+(?:\.\d+)?)(?:ULL|LL|U|L|F)?)"
    r"|(?P<decl>\d+'[UIFB]\b)|(?P<num>0x[0-9a-fA-F]+(?:ULL|LL|U|L)?|\d+\.\d+F?|\d+(?:ULL|LL|U|L|F)?)"
    r"|(?P<type>\.(?:bf|[uifb])\d+\b)|(?P<id>[A-Za-z_]\w*)"
    r"|(?P<op>\*\*|<<|>>|<=|>=|==|!=|<>|&&|\|\||\+=|-=|\|=|&=|\^=|[-+*/%&|^!~<>=?:;,.(){}\[\]]))"
)
INPUTS = {"S0", "S1", "S2", "D0", "SCC", "EXEC", "VCC", "SIMM16", "SIMM32", "laneId", "M0"}
LEVELS = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!=", "<>"), ("<", ">", "<=", ">="), ("<<", ">>"))
LEVELS += (("+", "-"), ("*", "/", "%"), ("**",))
COMPARE = {"==": "==", "!=": "!=", "<>": "!=", "<": "<", ">": ">", "<=": "<=", ">=": ">="}
KEYWORDS = {"if", "then", "elsif", "else", "endif", "for", "in", "do", "endfor", "declare", "lambda", "return", "while"}


class Outside(Exception):
    """The text is outside the subset."""


@dataclass(frozen=True)
class Meaning:
    """``function(*inputs)`` gives a tuple of the outputs: unsigned bit patterns, conditions as bool. An input or output
    "VCC" is the lane's bit of the mask operand, "D0" of a comparison likewise ("LANE")."""

    function: Callable[..., tuple[Any, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str = ""


@dataclass(frozen=True)
class V:
    """A value in the generated code."""

    code: str
    kind: str  # u, i, f, bool
    bits: int
    const: Any = None
    hexadecimal: bool = False


def tokenize(text: str) -> list[tuple[str, str]]:
    text = re.sub(r"//[^\n]*", "", text)
    found, at = [], 0
    while at < len(text.rstrip()):
        match = TOKEN.match(text, at)
        if not match:
            raise Outside(f"at {text[at : at + 20]!r}")
        found.append((str(match.lastgroup), match.group().strip()))
        at = match.end()
    return found


class _Parser:
    """Tokens to nested tuples."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens, self.at = tokens, 0

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        word = self.peek()
        if not word or (expected is not None and word != expected):
            raise Outside(f"expected {expected}, found {word!r}")
        self.at += 1
        return word

    def block(self, *ends: str) -> list[Any]:
        found = []
        while self.peek() and self.peek() not in ends:
            if self.peek() == ";":
                self.take()
                continue
            found.append(self.statement())
        if ends and not self.peek():
            raise Outside(f"expected {ends}")
        return found

    def statement(self) -> Any:
        word = self.peek()
        if word == "declare":
            self.take()
            name = self.take()
            self.take(":")
            self.take()
            size = None
            if self.peek() == "[":
                self.take()
                size = self.expression()
                self.take("]")
            return ("declare", name, size)
        if word == "if":
            return self.conditional()
        if word == "for":
            self.take()
            name = self.take()
            self.take("in")
            low = self.expression()
            self.take(":")
            high = self.expression()
            self.take("do")
            body = self.block("endfor")
            self.take("endfor")
            return ("for", name, low, high, body)
        if word in KEYWORDS:
            raise Outside(word)
        target = self.postfix()
        operator = self.peek()
        if operator in ("=", "+=", "-=", "|=", "&=", "^="):
            self.take()
            if self.peek() == "lambda":
                return self.function(target)
            value = self.expression()
            if operator != "=":
                value = ("binary", operator[0], target, value)
            return ("assign", target, value)
        if target[0] == "call":
            return ("do", target)
        raise Outside(f"statement at {operator!r}")

    def function(self, target: Any) -> Any:
        self.take("lambda")
        self.take("(")
        names = [self.take()]
        while self.peek() == ",":
            self.take()
            names.append(self.take())
        self.take(")")
        self.take("(")
        body = self.expression()
        self.take(")")
        return ("lambda", target[1], names, body)

    def conditional(self) -> Any:
        branches, otherwise = [], []
        self.take("if")
        condition = self.expression()
        self.take("then")
        branches.append((condition, self.block("elsif", "else", "endif")))
        while self.peek() == "elsif":
            self.take()
            condition = self.expression()
            self.take("then")
            branches.append((condition, self.block("elsif", "else", "endif")))
        if self.peek() == "else":
            self.take()
            otherwise = self.block("endif")
        self.take("endif")
        return ("if", branches, otherwise)

    def expression(self) -> Any:
        condition = self.binary(0)
        if self.peek() == "?":
            self.take()
            yes = self.expression()
            self.take(":")
            return ("ternary", condition, yes, self.expression())
        return condition

    def binary(self, level: int) -> Any:
        if level == len(LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while self.peek() in LEVELS[level]:
            operator = self.take()
            left = ("binary", operator, left, self.binary(level + 1))
        return left

    def unary(self) -> Any:
        if self.peek() in ("!", "~", "-", "+"):
            return ("unary", self.take(), self.unary())
        return self.postfix()

    def postfix(self) -> Any:
        node = self.primary()
        while True:
            if self.kind() == "type":
                node = ("as", node, self.take()[1:])
            elif self.peek() == "[":
                self.take()
                high = self.expression()
                if self.peek() == ":":
                    self.take()
                    node = ("slice", node, high, self.expression())
                else:
                    node = ("index", node, high)
                self.take("]")
            elif self.peek() == "." and node[0] == "name":
                self.take()
                node = ("name", f"{node[1]}.{self.take()}")
            else:
                return node

    def primary(self) -> Any:
        kind, word = self.kind(), self.take()
        if kind == "num":
            return ("num", word)
        if kind == "typed":
            bits, value = word.split("'")
            return ("typed", int(bits), value)
        if kind == "cast":
            self.take("(")
            inner = self.expression()
            self.take(")")
            bits, letter = word.split("'")
            return ("cast", int(bits), letter, inner)
        if word == "(":
            inner = self.expression()
            self.take(")")
            return inner
        if word == "{":
            parts = [self.expression()]
            while self.peek() == ",":
                self.take()
                parts.append(self.expression())
            self.take("}")
            return ("concat", parts)
        if kind == "id" and word not in KEYWORDS:
            if self.peek() == "(":
                self.take()
                arguments = [] if self.peek() == ")" else [self.expression()]
                while self.peek() == ",":
                    self.take()
                    arguments.append(self.expression())
                self.take(")")
                return ("call", word, arguments)
            return ("name", word)
        raise Outside(f"at {word!r}")


def compile_text(name: str, text: str, width: dict[str, int], scalar: bool) -> Meaning:
    """The function for one opcode's text. ``width``: bits of S0, S1, S2, D0 as the operand table has them."""
    from tests.rdna.pcode_emit import Emitter

    try:
        program = _Parser(tokenize(text)).block()
        emitter = Emitter(width, scalar)
        emitter.statements(program)
        source, inputs, outputs = emitter.finish(re.sub(r"\W", "_", name))
    except (Outside, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnknownInstruction(
            f"{name}: no meaning; the manual's text is outside the compiled subset ({error})."
        ) from None
    space: dict[str, Any] = {"np": np, "A": arithmetic}
    exec(compile(source, f"<{name}>", "exec"), space)
    return Meaning(space[re.sub(r"\W", "_", name)], inputs, outputs, source)
