"""Values in the generated code of ``pcode``: types, constants, lanes, operators and functions."""

from __future__ import annotations

from typing import Any

from tests.rdna import arithmetic
from tests.rdna.pcode import COMPARE, INPUTS, Outside, V

FLOATS = {16: "np.float16", 32: "np.float32", 64: "np.float64"}
# name -> (kind, bits) of the result; the arguments are passed with their own types
FUNCTIONS = {
    "u32_to_f32": ("f", 32), "i32_to_f32": ("f", 32), "f32_to_u32": ("u", 32), "f32_to_i32": ("i", 32),
    "f16_to_f32": ("f", 32), "f32_to_f16": ("f", 16), "f32_to_f64": ("f", 64), "f64_to_f32": ("f", 32),
    "i32_to_f64": ("f", 64), "u32_to_f64": ("f", 64), "f64_to_i32": ("i", 32), "f64_to_u32": ("u", 32),
    "u16_to_f16": ("f", 16), "i16_to_f16": ("f", 16), "f16_to_u16": ("u", 16), "f16_to_i16": ("i", 16),
    "u8_to_u32": ("u", 32), "u4_to_u32": ("u", 32), "i32_to_i16": ("i", 16), "u32_to_u16": ("u", 16),
    "exponent": ("i", 32), "isNAN": ("bool", 1), "sign": ("u", 1), "isSignalNAN": ("bool", 1),
    "isQuietNAN": ("bool", 1), "isEven": ("bool", 1),
}  # fmt: skip
SAME = {"abs", "floor", "trunc", "fract", "sqrt", "cvtToQuietNAN"}
MINMAX = {f"v_{m}_{t}" for m in ("min", "max") for t in ("i32", "u32", "i16", "u16")}
MINMAX |= {f"v_{m}3_{t}" for m in ("min", "max") for t in ("i32", "u32", "i16", "u16")}
FLOAT_MINMAX = {f"v_{m}{n}_{t}" for m in ("min", "max") for n in ("", "_num", "3", "3_num") for t in ("f32", "f16")}


def dtype(kind: str, bits: int) -> str:
    if kind == "f":
        return FLOATS[bits]
    return f"np.{'u' if kind == 'u' else ''}int{32 if bits <= 32 else 64}"


class Values:
    """Turns expressions into typed Python source; ``env`` holds what each name stands for."""

    def __init__(self, width: dict[str, int], scalar: bool) -> None:
        self.width, self.scalar = width, scalar
        self.env: dict[str, Any] = {"WAVE32": V("True", "bool", 1, True), "WAVE64": V("False", "bool", 1, False)}
        self.env["WAVE_MODE.IEEE"] = V("True", "bool", 1, True)
        self.lines: list[str] = []
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.lambdas: dict[str, tuple[list[str], Any]] = {}
        self.count = 0

    def keep(self, value: V) -> V:
        """Give the value a name, so that it is computed once."""
        if value.const is not None or value.code.isidentifier():
            return value
        self.count += 1
        self.lines.append(f"t{self.count} = {value.code}")
        return V(f"t{self.count}", value.kind, value.bits)

    def base(self, node: Any) -> str:
        while node[0] == "as":
            node = node[1]
        if node[0] != "name":
            raise Outside(f"expected a name, found {node[0]}")
        return str(node[1])

    def bits_of(self, name: str) -> int:
        return max(32, self.width.get(name, 32)) if name in INPUTS else 32

    # ---- values

    def read(self, name: str) -> V:
        if name in self.env:
            found = self.env[name]
            if isinstance(found, dict):
                raise Outside(f"array {name} as a value")
            return found
        if name not in INPUTS and name != "LANE":
            constants = {"PI": V("3.141592653589793", "f", 64, 3.141592653589793)}
            if name in constants:
                return constants[name]
            raise Outside(f"unknown name {name}")
        if name not in self.inputs:
            self.inputs.append(name)
        if name in ("SCC", "VCC", "LANE"):
            value = V(name, "bool", 1)
        else:
            value = V(name, "u", 64 if self.bits_of(name) > 32 else 32)
        self.env[name] = value
        return value

    def constant(self, node: Any) -> int:
        value = self.value(node).const
        if value is None:
            raise Outside("index that is not constant")
        return int(value)

    def value(self, node: Any) -> V:
        return getattr(self, "v_" + node[0])(*node[1:])

    def v_num(self, word: str) -> V:
        if word.startswith("0x"):
            number = int(word.rstrip("UL"), 16)
            return V(hex(number), "u" if "U" in word else "i", 64 if "LL" in word or number >> 32 else 32, number, True)
        if "." in word or word.endswith("F"):
            bits = 32 if word.endswith("F") else 64
            return V(word.rstrip("F"), "f", bits, float(word.rstrip("F")))
        return V(word.rstrip("UL"), "u" if "U" in word else "i", 64 if "LL" in word else 32, int(word.rstrip("UL")))

    def v_typed(self, bits: int, value: str) -> V:
        if "." in value:
            return V(value, "f", bits, float(value))
        number = int(value.rstrip("UL"), 0)
        return V(str(number), "u", bits, number, True)

    def v_name(self, name: str) -> V:
        return self.read(name)

    def v_as(self, inner: Any, kind: str) -> V:
        if inner[0] == "index" and inner[1][0] == "name" and inner[1][1] == "OPSEL":
            raise Outside("OPSEL")
        return self.reinterpret(self.value(inner), kind)

    def reinterpret(self, value: V, kind: str) -> V:
        letter, bits = ("bf", 16) if kind.startswith("bf") else (kind[0], int(kind[1:]))
        if letter == "bf":
            raw = self.raw(value)
            return V(f"A.bf16_to_f32({raw.code})", "f", 32)
        if value.kind == letter and value.bits == bits:
            return value
        if letter == "b":
            letter = "u"
        raw = self.raw(value)
        if raw.const is not None and letter in "ui":
            return V(str(raw.const), letter, bits, raw.const & ((1 << bits) - 1) if letter == "u" else raw.const)
        if raw.const is not None:
            raise Outside("constant as another type")
        if letter == "f":
            if bits == 16:
                return V(f"A.low16({raw.code}).view(np.float16)", "f", 16)
            code = raw.code if (raw.bits > 32) == (bits > 32) else f"({raw.code}).astype({dtype('u', bits)})"
            return V(f"({code}).view({FLOATS[bits]})", "f", bits)
        wide = bits > 32
        code = raw.code if (raw.bits > 32) == wide else f"({raw.code}).astype({dtype('u', bits)})"
        if letter == "u":
            if bits in (32, 64) or raw.bits <= bits:
                return V(code, "u", bits)
            return V(f"({code} & {(1 << bits) - 1:#x})", "u", bits)
        code = f"({code}).view({dtype('i', bits)})"
        return V(code if bits in (32, 64) else f"(({code} << {32 - bits}) >> {32 - bits})", "i", bits)

    def raw(self, value: V) -> V:
        """The bit pattern, unsigned."""
        if value.kind == "u":
            return value
        if value.const is not None and value.kind == "i":
            bits = max(32, value.bits)
            return V(str(value.const & ((1 << bits) - 1)), "u", bits, value.const & ((1 << bits) - 1))
        if value.const is not None and value.kind == "f":
            kind = {16: "np.uint16", 32: "np.uint32", 64: "np.uint64"}[value.bits]
            code = f"np.array({value.code}, {FLOATS[value.bits]}).view({kind})"
            return V(f"({code}).astype(np.uint32)" if value.bits == 16 else code, "u", value.bits)
        if value.kind == "bool":
            return V(f"({value.code}).astype(np.uint32)", "u", 1)
        if value.kind == "f":
            if value.bits == 16:
                return V(f"({value.code}).view(np.uint16).astype(np.uint32)", "u", 16)
            return V(f"({value.code}).view({dtype('u', value.bits)})", "u", value.bits)
        code = f"({value.code}).view({dtype('u', value.bits)})"
        return V(code if value.bits in (32, 64) else f"({code} & {(1 << value.bits) - 1:#x})", "u", value.bits)

    def convert(self, value: V, kind: str) -> V:
        """To the type of an assignment's target: floats by value, everything else by its bits."""
        letter, bits = ("u" if kind[0] == "b" else kind[0]), int(kind.lstrip("uifb"))
        if kind.startswith("bf"):
            return V(f"A.f32_to_bf16({value.code})", "u", 16)
        if letter == "f":
            if value.kind == "f":
                return self.cast(value, "f", bits)
            if value.const is not None:
                return V(str(float(value.const)), "f", bits, float(value.const))
            return self.reinterpret(value, kind)
        if value.kind == "f":
            return self.reinterpret(value, kind)
        return self.cast(value, letter, bits)

    def cast(self, value: V, letter: str, bits: int) -> V:
        if letter == "b":
            letter = "u"
        if bits > 64:
            raise Outside(f"{bits} bits")
        if value.const is not None:
            if letter == "f":
                if value.kind != "f" and value.hexadecimal:
                    return V(f"np.array({value.const:#x}, np.uint32).view(np.float32)", "f", bits)
                return V(repr(float(value.const)), "f", bits, float(value.const))
            number = int(value.const) & ((1 << bits) - 1)
            if letter == "i" and number >> (bits - 1):
                number -= 1 << bits
            return V(str(number), letter, bits, number)
        if letter == "f":
            if value.kind == "f" and value.bits == bits:
                return value
            return V(f"({value.code}).astype({FLOATS[bits]})", "f", bits)
        if value.kind == "f":
            raise Outside("cast of a float to an integer")
        if value.kind == "bool":
            return V(f"({value.code}).astype({dtype(letter, bits)})", letter, bits)
        code = value.code
        if (value.bits > 32) != (bits > 32) or value.kind != letter:
            code = f"({code}).astype({dtype(letter, bits)})"
        if bits not in (32, 64) and value.bits > bits:
            return self.reinterpret(V(code, "u", value.bits), f"{letter}{bits}")
        return V(code, letter, bits)

    def v_cast(self, bits: int, letter: str, inner: Any) -> V:
        value = self.value(inner)
        letter = {"U": "u", "I": "i", "F": "f", "B": "u"}[letter]
        if letter != "f" and value.kind == "f":
            return self.cast(self.raw(value), letter, bits)
        return self.cast(value, letter, bits)

    def v_concat(self, parts: list[Any]) -> V:
        values = [self.raw(self.value(part)) for part in parts]
        total = sum(v.bits for v in values)
        if total > 64:
            raise Outside(f"{total} bits")
        bits = 64 if total > 32 else 32
        at, codes = 0, []
        for v in reversed(values):
            if v.const is None:
                codes.append(f"(({v.code}).astype({dtype('u', bits)}) << {at})")
            elif v.const:
                codes.append(f"np.array({v.const << at}, {dtype('u', bits)})")
            at += v.bits
        return V("(" + " | ".join(codes) + ")", "u", total)

    def v_slice(self, inner: Any, high_node: Any, low_node: Any) -> V:
        high, low = self.constant(high_node), self.constant(low_node)
        value = self.raw(self.value(inner))
        if high < low:
            raise Outside("reversed bits")
        if value.const is not None:
            number = value.const >> low & ((1 << high - low + 1) - 1)
            return V(str(number), "u", high - low + 1, number)
        code = value.code if low == 0 else f"({value.code} >> {low})"
        bits = high - low + 1
        if value.bits > high + 1:
            code = f"({code} & {(1 << bits) - 1:#x})"
        if value.bits > 32 and bits <= 32:
            code = f"({code}).astype(np.uint32)"
        return V(code, "u", bits)

    def v_index(self, inner: Any, index: Any) -> V:
        if index == ("name", "laneId"):
            name = self.base(inner)
            if name != "VCC":
                raise Outside(f"lane of {name}")
            return self.read("VCC")
        if inner[0] == "name" and isinstance(self.env.get(inner[1]), dict):
            found: V = self.env[inner[1]][self.constant(index)]
            return found
        value, at = self.raw(self.value(inner)), self.value(index)
        shift = str(at.const) if at.const is not None else f"({self.raw(at).code}).astype({dtype('u', value.bits)})"
        return V(f"(({value.code} >> {shift}) & 1)", "u", 1)

    def truth(self, value: V) -> V:
        if value.kind == "bool":
            return value
        if value.const is not None:
            return V(str(bool(value.const)), "bool", 1, bool(value.const))
        return V(f"({value.code} != 0)", "bool", 1)

    def select(self, test: V, yes: V, no: V) -> V:
        yes, no = self.unify(yes, no)
        a, b = self.array(yes), self.array(no)
        return V(f"np.where({test.code}, {a}, {b})", yes.kind, yes.bits)

    def array(self, value: V) -> str:
        if value.const is None:
            return value.code
        if value.kind == "bool":
            return f"np.bool_({value.const})"
        return f"{dtype(value.kind, value.bits)}({value.const!r})"

    def v_ternary(self, condition: Any, yes: Any, no: Any) -> V:
        test = self.truth(self.value(condition))
        if test.const is not None:
            return self.value(yes if test.const else no)
        one, zero = self.value(yes), self.value(no)
        if (one.const, zero.const, one.kind) == (1, 0, "u"):
            return test
        return self.select(test, one, zero)

    def unify(self, a: V, b: V) -> tuple[V, V]:
        if a.kind == "bool" and b.kind == "bool":
            return a, b
        a = self.cast(a, "u", 1) if a.kind == "bool" else a
        b = self.cast(b, "u", 1) if b.kind == "bool" else b
        if "f" in (a.kind, b.kind):
            floats = [v for v in (a, b) if v.kind == "f" and v.const is None] or [v for v in (a, b) if v.kind == "f"]
            bits = max(v.bits for v in floats)
            return self.cast(a, "f", bits), self.cast(b, "f", bits)
        if a.const is not None and b.const is None and a.bits <= max(32, b.bits):
            return self.cast(a, b.kind, b.bits if a.const.bit_length() <= b.bits else 32), b
        if b.const is not None and a.const is None and b.bits <= max(32, a.bits):
            return a, self.cast(b, a.kind, a.bits if b.const.bit_length() <= a.bits else 32)
        bits = max(a.bits, b.bits)
        kind = "u" if "u" in (a.kind, b.kind) else "i"
        return self.cast(a, kind, bits), self.cast(b, kind, bits)

    def v_unary(self, operator: str, inner: Any) -> V:
        value = self.value(inner)
        if operator == "+":
            return value
        if operator == "!":
            value = self.truth(value)
            if value.const is not None:
                return V(str(not value.const), "bool", 1, not value.const)
            return V(f"~({value.code})", "bool", 1)
        if value.const is not None:
            number = -value.const if operator == "-" else ~value.const
            return V(repr(number), "i" if value.kind == "u" else value.kind, value.bits, number)
        if operator == "~":
            if value.kind == "bool":
                return V(f"~({value.code})", "bool", 1)
            mask = f" & {(1 << value.bits) - 1:#x}" if value.kind == "u" and value.bits not in (32, 64) else ""
            return V(f"(~({value.code}){mask})", value.kind, value.bits)
        return V(f"(-({value.code}))", value.kind, value.bits)

    def v_binary(self, operator: str, left: Any, right: Any) -> V:
        a, b = self.value(left), self.value(right)
        if operator in ("&&", "||"):
            a, b = self.truth(a), self.truth(b)
            for x, y in ((a, b), (b, a)):
                if x.const is not None:
                    return y if bool(x.const) == (operator == "&&") else x
            return V(f"({a.code} {operator[0]} {b.code})", "bool", 1)
        if a.const is not None and b.const is not None:
            number = eval(
                f"a {COMPARE.get(operator, operator)} b".replace("a", repr(a.const)).replace("b", repr(b.const))
            )
            if operator in COMPARE:
                return V(str(number), "bool", 1, number)
            bits = max(a.bits, b.bits)
            return V(repr(number), "f" if isinstance(number, float) else a.kind, bits, number)
        if operator in ("<<", ">>"):
            kind = dtype(a.kind, a.bits)
            if b.const is not None:
                shift = str(b.const)
            else:
                amount = self.raw(b)
                if (amount.bits > 32) == (a.bits > 32):
                    shift = amount.code if a.kind == "u" else f"({amount.code}).view({kind})"
                else:
                    shift = f"({amount.code}).astype({kind})"
            code = f"({self.array(a)} {operator} {shift})"
            return self.wrapped(code, a) if operator == "<<" else V(code, a.kind, a.bits)
        if operator == "**":
            if a.const != 2.0 or b.kind == "f":
                raise Outside("power")
            return V(f"A.power_of_two({b.code})", "f", 64)
        if operator == "*" and "A.power_of_two" in b.code:
            return V(f"A.scale({a.code}, {b.code})", a.kind, a.bits)
        a, b = self.unify(a, b)
        ca = a.code if a.const is None else (repr(a.const) if a.kind != "bool" else self.array(a))
        cb = b.code if b.const is None else (repr(b.const) if b.kind != "bool" else self.array(b))
        if operator in COMPARE:
            return V(f"({ca} {COMPARE[operator]} {cb})", "bool", 1)
        if a.kind == "bool":
            return V(f"({ca} {operator} {cb})", "bool", 1)
        if operator in "/%" and a.kind != "f":
            raise Outside("integer division")
        if operator == "/":
            return V(f"A.divide({ca}, {cb})", a.kind, a.bits)
        value = V(f"({ca} {operator} {cb})", a.kind, max(a.bits, b.bits))
        return self.wrapped(value.code, value) if operator in "+-*" else value

    def wrapped(self, code: str, like: V) -> V:
        """Keep a narrow integer narrow."""
        if like.kind == "f" or like.bits in (32, 64):
            return V(code, like.kind, like.bits)
        wide = V(code, like.kind, 32 if like.bits <= 32 else 64)
        return self.reinterpret(self.raw(wide), f"{like.kind}{like.bits}")

    def v_call(self, name: str, arguments: list[Any]) -> V:
        if name in self.lambdas:
            names, body = self.lambdas[name]
            saved = {n: self.env.get(n) for n in names}
            for n, argument in zip(names, arguments, strict=True):
                self.env[n] = self.keep(self.value(argument))
            result = self.keep(self.value(body))
            for n, old in saved.items():
                if old is None:
                    del self.env[n]
                else:
                    self.env[n] = old
            return result
        values = [self.value(argument) for argument in arguments]
        codes = ", ".join(self.array(v) for v in values)
        if name == "signext":
            return values[0]
        if name == "signext_from_bit":
            return V(f"A.sign_extend({codes})", "i", values[0].bits)
        if name == "fma":
            bits = max(v.bits for v in values)
            if any(v.kind != "f" for v in values) or bits not in (16, 32):
                raise Outside(f"fma of {bits} bits")
            return V(f"A.fma{bits}({codes})", "f", bits)
        if name == "ldexp":
            return V(f"A.ldexp({codes})", values[0].kind, values[0].bits)
        if name in SAME:
            return V(f"A.{name}({codes})", values[0].kind, values[0].bits)
        if name in MINMAX or name in FLOAT_MINMAX:
            kind, bits = name.rsplit("_", 1)[1][0], int(name.rsplit("_", 1)[1][1:])
            function = (
                ("maximum" if "max" in name else "minimum") if kind != "f" else ("fmax" if "max" in name else "fmin")
            )
            module = "np" if kind != "f" else "A"
            code = self.array(values[0])
            for v in values[1:]:
                code = f"{module}.{function}({code}, {self.array(v)})"
            return V(code, kind, bits)
        if name in FUNCTIONS and hasattr(arithmetic, name):
            kind, bits = FUNCTIONS[name]
            return V(f"A.{name}({codes})", kind, bits)
        raise Outside(f"function {name}")
