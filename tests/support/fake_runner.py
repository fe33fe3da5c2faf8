"""A runner without a model: logits are a function of the tokens before them. Plus a sampler chain in numpy."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from pyluce.engine.protocols import Logits, Row


class FakeState:
    """The tokens of one sequence."""

    def __init__(self, runner: FakeRunner) -> None:
        self.tokens: list[int] = []
        self._runner = runner
        self.freed = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    def rollback(self, count: int) -> None:
        assert not self.freed
        assert 0 < count < len(self.tokens)
        del self.tokens[-count:]
        self._runner.calls.append(("rollback", count))

    def free(self) -> None:
        assert not self.freed, "a sequence was freed twice"
        self.freed = True
        self._runner.live.remove(self)


class FakeRunner:
    """Deterministic logits from a hash of the token prefix; counts what it is asked; checks its thread and its slots.

    `script` maps the number of tokens so far to a token that must win there; `damage` maps it to a function that spoils the row.
    `guess` drafts: the tokens so far, with the next one, and how many are wanted.
    """

    graphs_built = 0

    def __init__(
        self,
        vocab_size: int,
        *,
        n_slots: int = 1,
        script: Callable[[list[int]], int | None] | None = None,
        damage: Callable[[list[int], Logits], None] | None = None,
        guess: Callable[[list[int], int], list[int]] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.n_slots = n_slots
        self.live: list[FakeState] = []
        self.calls: list[tuple[str, int]] = []
        self.closed = False
        self.logits_read = 0  # rows of `decode_rows` that asked for them
        self._script = script
        self._damage = damage
        self._guess = guess
        self._thread = threading.get_ident()

    @property
    def n_free_slots(self) -> int:
        return self.n_slots - len(self.live)

    def memory_report(self) -> dict[str, object]:
        self._check()
        return {"calls": len(self.calls)}

    def new_sequence(self) -> FakeState:
        self._check()
        if len(self.live) >= self.n_slots:
            raise RuntimeError(f"no free slot: all {self.n_slots} are taken")
        state = FakeState(self)
        self.live.append(state)
        return state

    def prefill(
        self,
        state: FakeState,
        tokens: Sequence[int],
        want: Literal["last", "all", "none"] = "last",
        cuts: Sequence[int] | None = None,
    ) -> Logits | None:
        self._check()
        assert not state.freed
        assert tokens
        self.calls.append((f"prefill:{want}", len(tokens)))
        rows = []
        for token in tokens:
            state.tokens.append(token)
            if want == "all":
                rows.append(self._row(state.tokens))
        if want == "all":
            return np.stack(rows)
        return self._row(state.tokens) if want == "last" else None

    def decode(self, rows: Sequence[tuple[FakeState, int]]) -> Logits:
        self._check()
        self.calls.append(("decode", len(rows)))
        logits = []
        for state, token in rows:
            assert not state.freed
            state.tokens.append(token)
            logits.append(self._row(state.tokens))
        return np.stack(logits)

    def decode_rows(self, rows: Sequence[tuple[FakeState, int]], wants_logits: Sequence[bool]) -> list[Row]:
        logits = self.decode(rows)
        self.logits_read += sum(wants_logits)
        best = [int(row.argmax()) for row in logits]
        return [
            row if wants or not np.isfinite(row[token]) else token
            for row, token, wants in zip(logits, best, wants_logits, strict=True)
        ]

    def draft(self, requests: Sequence[tuple[FakeState, int, int]]) -> list[list[int]]:
        self._check()
        assert self._guess is not None
        drafts = [self._guess([*state.tokens, token], count) for state, token, count in requests]
        assert [len(mine) for mine in drafts] == [count for _, _, count in requests]
        return drafts

    def close(self) -> None:
        self._check()
        assert not self.live, "the runner was closed before its sequences"
        self.closed = True

    def _check(self) -> None:
        assert threading.get_ident() == self._thread, "used from a thread that does not own the runner"
        assert not self.closed

    def _row(self, tokens: list[int]) -> Logits:
        digest = hashlib.sha256(struct.pack(f"<{len(tokens)}i", *tokens)).digest()
        rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
        row = rng.standard_normal(self.vocab_size, dtype=np.float32)
        winner = self._script(tokens) if self._script else None
        if winner is not None:
            row[winner] = 100.0
        if self._damage:
            self._damage(tokens, row)
        return row


class NumpyChain:
    """The documented meaning of every chain step, in double precision; the oracle for libllama's chain."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, tuple[object, ...]]] = []
        self._windows: list[list[int]] = []
        self._rng = np.random.default_rng(0)
        self.closed = False

    def add(self, name: str, *arguments: object) -> None:
        self.steps.append((name, arguments))
        self._windows.append([])
        if name == "draw":
            self._rng = np.random.default_rng(int(arguments[0]))  # type: ignore[call-overload]

    def accept(self, token: int) -> None:
        for (name, arguments), window in zip(self.steps, self._windows, strict=True):
            if name == "penalties":
                window.append(token)
                del window[: -int(arguments[0])]  # type: ignore[call-overload]

    def probabilities(self, logits: Logits) -> np.ndarray:
        """What the last step draws from [n_vocab]."""
        values = logits.astype(np.float64)
        for (name, arguments), window in zip(self.steps, self._windows, strict=True):
            values = getattr(self, f"_{name}")(values, window, *arguments)
        return _softmax(values)

    def sample(self, logits: Logits) -> int:
        probabilities = self.probabilities(logits)
        greedy = self.steps[-1][0] == "greedy"
        token = int(probabilities.argmax() if greedy else self._rng.choice(len(probabilities), p=probabilities))
        self.accept(token)
        return token

    def close(self) -> None:
        assert not self.closed
        self.closed = True

    def _logit_bias(self, values: np.ndarray, window: list[int], bias: dict[int, float]) -> np.ndarray:
        values = values.copy()
        for token, amount in bias.items():
            values[token] += amount
        return values

    def _penalties(
        self, values: np.ndarray, window: list[int], size: int, repeat: float, frequency: float, presence: float
    ) -> np.ndarray:
        values = values.copy()
        for token in set(window):
            values[token] = values[token] * repeat if values[token] <= 0 else values[token] / repeat
            values[token] -= window.count(token) * frequency + presence
        return values

    def _top_k(self, values: np.ndarray, window: list[int], k: int) -> np.ndarray:
        return _keep(values, np.argsort(-values, kind="stable")[:k])

    def _temperature(self, values: np.ndarray, window: list[int], temperature: float) -> np.ndarray:
        return values / temperature

    def _top_p(self, values: np.ndarray, window: list[int], p: float) -> np.ndarray:
        order = np.argsort(-values, kind="stable")
        mass = np.cumsum(_softmax(values)[order])
        return _keep(values, order[: int(np.searchsorted(mass, p)) + 1])

    def _min_p(self, values: np.ndarray, window: list[int], p: float) -> np.ndarray:
        if p <= 0:
            return values
        return _keep(values, np.flatnonzero(values >= values.max() + np.log(p)))

    def _greedy(self, values: np.ndarray, window: list[int]) -> np.ndarray:
        return _keep(values, np.array([values.argmax()]))

    def _draw(self, values: np.ndarray, window: list[int], seed: int) -> np.ndarray:
        return values


def _softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max())
    return powers / powers.sum()


def _keep(values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    kept = np.full_like(values, -np.inf)
    kept[tokens] = values[tokens]
    return kept
