"""A committed fixture's view of logits: all of them for a small vocabulary, a fixed sample for a large one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
MAX_COLUMNS = 256


def sample_columns(n_vocab: int) -> np.ndarray:
    """At most MAX_COLUMNS vocabulary ids, spread evenly: int32."""
    return np.unique(np.linspace(0, n_vocab - 1, min(n_vocab, MAX_COLUMNS)).astype(np.int32))


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Reference:
    """One prompt's reference logits.

    `logits` [T, len(columns)] are float32 at `columns`; `best` [T] is the argmax over the whole vocabulary and
    `best_logit` [T] its value; `log_sum` [T] is the log of the sum of exponentials, which every logit enters.
    """

    tokens: np.ndarray
    columns: np.ndarray
    logits: np.ndarray
    best: np.ndarray
    best_logit: np.ndarray
    log_sum: np.ndarray
    about: dict[str, Any]

    @classmethod
    def from_logits(cls, tokens: np.ndarray, logits: np.ndarray, about: dict[str, Any]) -> Reference:
        columns = sample_columns(logits.shape[1])
        wide = logits.astype(np.float64)
        top = wide.max(axis=1)
        log_sum = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
        return cls(
            tokens=np.asarray(tokens, np.int32),
            columns=columns,
            logits=np.ascontiguousarray(logits[:, columns], dtype=np.float32),
            best=logits.argmax(axis=1).astype(np.int32),
            best_logit=top.astype(np.float32),
            log_sum=log_sum.astype(np.float32),
            about=about,
        )

    def save(self, path: Path) -> None:
        arrays = {
            name: getattr(self, name) for name in ("tokens", "columns", "logits", "best", "best_logit", "log_sum")
        }
        np.savez_compressed(path, about=np.array(json.dumps(self.about)), **arrays)

    @classmethod
    def load(cls, path: Path) -> Reference:
        with np.load(path) as stored:
            names = ("tokens", "columns", "logits", "best", "best_logit", "log_sum")
            return cls(**{name: stored[name] for name in names}, about=json.loads(str(stored["about"])))

    def check_model(self, path: Path) -> None:
        """Fail before comparing anything when the model is not the one that the reference was computed from."""
        found = file_sha256(path)
        if found != self.about["model_sha256"]:
            raise AssertionError(
                f"{path.name}: expected SHA-256 {self.about['model_sha256']}, found {found}: the generator of this model "
                "has changed; run tests/oracles/make_fixtures.py and commit what it writes"
            )

    def max_difference(self, logits: np.ndarray) -> float:
        """Largest distance of `logits` [T, n_vocab] from the stored columns, the best logit and the log sum."""
        other = Reference.from_logits(self.tokens, logits, {})
        at_best = logits[np.arange(len(self.best)), self.best]
        gaps = (other.logits - self.logits, at_best - self.best_logit, other.log_sum - self.log_sum)
        worst = max(float(np.abs(gap.astype(np.float64)).max()) for gap in gaps)
        return worst if np.isfinite(logits).all() else float("inf")

    def agreement(self, logits: np.ndarray) -> float:
        """Share of rows with the reference's argmax."""
        return float((logits.argmax(axis=1) == self.best).mean())
