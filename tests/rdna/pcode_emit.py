"""Statements of parsed pseudocode to Python source (see ``pcode``)."""

from __future__ import annotations

from typing import Any

from tests.rdna.pcode import INPUTS, Outside, V
from tests.rdna.pcode_values import Values, dtype


class Emitter(Values):
    """Runs through a program's statements; ``finish`` gives the function's source."""

    # ---- statements

    def statements(self, program: list[Any]) -> None:
        for statement in program:
            getattr(self, "_" + statement[0])(*statement[1:])

    def _declare(self, name: str, size: Any) -> None:
        if size is not None:
            self.env[name] = {}

    def _do(self, call: Any) -> None:
        if call[1] not in ("nop", "s_nop"):
            raise Outside(f"call of {call[1]}")

    def _lambda(self, name: str, names: list[str], body: Any) -> None:
        self.lambdas[name] = (names, body)

    def _for(self, name: str, low: Any, high: Any, body: list[Any]) -> None:
        start, stop = self.value(low).const, self.value(high).const
        if start is None or stop is None or stop - start > 63:
            raise Outside("loop bounds")
        for i in range(start, stop + 1):
            self.env[name] = V(str(i), "i", 32, i)
            self.statements(body)

    def _if(self, branches: list[Any], otherwise: list[Any]) -> None:
        if not branches:
            return self.statements(otherwise)
        (condition, body), rest = branches[0], branches[1:]
        test = self.truth(self.value(condition))
        if test.const is not None:
            return self.statements(body) if test.const else self._if(rest, otherwise)
        test = self.keep(test)
        before = dict(self.env)
        self.statements(body)
        yes, self.env = self.env, dict(before)
        self._if(rest, otherwise)
        no = self.env
        merged = dict(no)
        for name in yes:
            a, b = yes[name], no.get(name)
            if a == b:
                continue
            if isinstance(a, dict):
                raise Outside("array in a condition")
            if b is None:
                if name not in ("D0", "SCC", "EXEC", "VCC", "LANE"):
                    continue  # a temporary of this branch
                b = self.read(name)
            merged[name] = self.keep(self.select(test, a, b))
        for name in no:
            if name not in yes and name in ("D0", "SCC", "EXEC", "VCC", "LANE"):
                merged[name] = self.keep(self.select(test, self.read(name), no[name]))
        self.env = merged
        return None

    def _assign(self, target: Any, value: Any) -> None:
        if target[0] == "concat":  # { D1.u1, D0.u64 } = 65 bits: only as carry-out and 64-bit sum
            raise Outside("assignment to several registers")
        if target[0] == "name" and target[1] == "D1":
            raise Outside("D1")
        self.store(target, self.value(value))

    def store(self, target: Any, value: V) -> None:
        as_type = None
        if target[0] == "as":
            as_type, target = target[2], target[1]
        if target[0] == "name":
            name = target[1]
            if name == "TRAPSTS.INVALID":
                return  # exceptions are not modelled
            if "." in name or name in ("PC", "MEM", "ROUND_MODE"):
                raise Outside(f"assignment to {name}")
            if as_type:
                value = self.convert(value, as_type)
            elif name in ("SCC",):
                value = self.truth(value)
            self.set(name, value)
        elif target[0] == "slice":
            name = self.base(target[1])
            high, low = self.constant(target[2]), self.constant(target[3])
            part = self.raw(self.convert(value, as_type) if as_type else value)
            whole = self.raw(self.read(name)) if name in self.env or name in INPUTS else None
            bits = max(self.bits_of(name), whole.bits if whole else 0, 32 if high < 32 else 64)
            kind = dtype("u", bits)
            mask = (1 << high - low + 1) - 1
            moved = f"(({part.code}).astype({kind}) & {mask:#x}) << {low}" if part.const is None else None
            if moved is None:
                moved = f"{kind}({(part.const & mask) << low:#x})"
            if whole is None or (high - low + 1) >= bits:
                self.set(name, V(f"({moved})", "u", bits))
            else:
                keep = ((1 << bits) - 1) & ~(mask << low)
                old = whole.code if whole.bits > 32 or bits <= 32 else f"({whole.code}).astype({kind})"
                self.set(name, V(f"(({old}) & {keep:#x} | ({moved}))", "u", bits))
        elif target[0] == "index":
            inner = target[1]
            if target[2] == ("name", "laneId") and self.base(inner) in ("VCC", "D0", "EXEC"):
                self.set({"D0": "LANE"}.get(self.base(inner), self.base(inner)), self.truth(value))
                return
            name = self.base(inner)
            if isinstance(self.env.get(name), dict):
                value = self.convert(value, as_type) if as_type else value
                self.env[name] = {**self.env[name], self.constant(target[2]): self.keep(value)}
                return
            raise Outside(f"assignment to a bit of {name}")
        else:
            raise Outside(f"assignment to {target[0]}")

    def set(self, name: str, value: V) -> None:
        if name in ("D0", "SCC", "EXEC", "VCC", "LANE") and name not in self.outputs:
            self.outputs.append(name)
        if name == "D0" and value.kind == "bool":
            value = self.raw(value)
        self.env[name] = self.keep(value)

    # ---- the function

    def finish(self, name: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        if not self.outputs:
            raise Outside("no result")
        results = []
        for output in self.outputs:
            value = self.env[output]
            if output in ("SCC", "VCC", "LANE") or (output == "EXEC" and value.kind == "bool"):
                results.append(self.array(self.truth(value)))
            else:
                results.append(self.array(self.raw(value)))
        body = [*self.lines, f"return ({', '.join(results)},)"]
        source = f"def {name}({', '.join(self.inputs)}):\n" + "".join(f"    {line}\n" for line in body)
        return source, tuple(self.inputs), tuple(self.outputs)
