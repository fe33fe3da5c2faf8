"""Hashes of whole answers, in a file: did these settings compute the same, bit for bit, as those?

The file is JSON. For each prompt it holds the token ids of the answer and, per step, the first 8 bytes of the SHA-256 of the logits,
so that two files that differ say where. `pyluce.engine.hashing` defines the digests; the total is the SHA-256 over the digests of
prompt ids, answer ids and logits of every prompt in order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyluce.engine import hash_tokens
from pyluce.luce import Completion
from pyluce.text.template import plain_message

FORMAT = "luce-hash-1"
STEP_BYTES = 8
PROMPT_KINDS = ("prompt", "messages", "tokens")


class HashFileError(ValueError):
    """A file of prompts or of hashes cannot be used; the message says where."""


@dataclass(frozen=True, slots=True)
class PromptHash:
    """One answer. `steps` are the beginnings of its steps' logit hashes, `STEP_BYTES` each, hexadecimal, without separators."""

    prompt_sha256: str
    tokens: tuple[int, ...]
    tokens_sha256: str
    logits_sha256: str
    steps: str

    @classmethod
    def of(cls, completion: Completion) -> PromptHash:
        """From an answer that was generated with `hash_logits=True`."""
        if completion.logits_sha256 is None:
            raise ValueError("the answer was generated without hash_logits")
        return cls(
            prompt_sha256=hash_tokens(completion.prompt_tokens).hex(),
            tokens=completion.tokens,
            tokens_sha256=completion.tokens_sha256,
            logits_sha256=completion.logits_sha256,
            steps=b"".join(step[:STEP_BYTES] for step in completion.step_sha256).hex(),
        )

    def step(self, index: int) -> str:
        """The hash of one step."""
        return self.steps[2 * STEP_BYTES * index : 2 * STEP_BYTES * (index + 1)]


@dataclass(frozen=True, slots=True)
class HashReport:
    """The hashes of a run over several prompts. `model` and `settings` say what was run; they are not compared."""

    n: int
    model: str
    settings: Mapping[str, Any]
    prompts: tuple[PromptHash, ...]

    @property
    def total_sha256(self) -> str:
        """One hash of everything that is compared."""
        total = hashlib.sha256()
        for prompt in self.prompts:
            for digest in (prompt.prompt_sha256, prompt.tokens_sha256, prompt.logits_sha256):
                total.update(bytes.fromhex(digest))
        return total.hexdigest()

    def write(self, path: Path) -> None:
        """Write the file, a line for each prompt."""
        head = {"format": FORMAT, "n": self.n, "model": self.model, "settings": dict(self.settings)}
        lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
        prompts = ",\n".join("  " + json.dumps(asdict(prompt)) for prompt in self.prompts)
        lines += [' "prompts": [', prompts, " ],", f' "total_sha256": {json.dumps(self.total_sha256)}']
        path.write_text("\n".join(["{", *lines, "}"]) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> HashReport:
        """Read a file. Raises HashFileError for one that is damaged or of another format."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise HashFileError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            found = document.get("format") if isinstance(document, dict) else type(document).__name__
            raise HashFileError(f"{path}: expected format {FORMAT!r}, found {found!r}")
        try:
            prompts = tuple(_read_prompt_hash(entry) for entry in document["prompts"])
            report = cls(int(document["n"]), str(document["model"]), dict(document["settings"]), prompts)
            total = document["total_sha256"]
        except (KeyError, TypeError, ValueError) as error:
            raise HashFileError(f"{path}: damaged, {type(error).__name__}: {error}") from error
        if report.total_sha256 != total:
            raise HashFileError(f"{path}: damaged, its hashes do not add up to its total_sha256")
        return report


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs first differ. `step` None: before the first step, in the prompt's token ids."""

    prompt: int
    step: int | None
    what: str

    def __str__(self) -> str:
        place = "its token ids" if self.step is None else f"step {self.step}"
        return f"prompt {self.prompt}, {place}: {self.what}"


def first_difference(expected: HashReport, found: HashReport) -> Difference | None:
    """The first place where two runs over the same prompts differ, or None. Raises HashFileError when they cannot be compared."""
    if len(expected.prompts) != len(found.prompts):
        raise HashFileError(
            f"expected {len(expected.prompts)} prompts, found {len(found.prompts)}: these are other prompts"
        )
    if expected.n != found.n:
        raise HashFileError(f"expected answers of at most {expected.n} tokens, found {found.n}: give -n {expected.n}")
    for index, (before, after) in enumerate(zip(expected.prompts, found.prompts, strict=True)):
        if before.prompt_sha256 != after.prompt_sha256:
            what = f"expected {before.prompt_sha256[:16]}, found {after.prompt_sha256[:16]}"
            return Difference(index, None, f"{what} (another prompt, template or vocabulary)")
        difference = _first_step(before, after)
        if difference is not None:
            return Difference(index, *difference)
    return None


def _first_step(expected: PromptHash, found: PromptHash) -> tuple[int, str] | None:
    for step in range(min(len(expected.tokens), len(found.tokens))):
        if expected.step(step) != found.step(step):
            token = f"token {expected.tokens[step]}" if expected.tokens[step] == found.tokens[step] else "another token"
            return step, f"expected logits {expected.step(step)}, found {found.step(step)} ({token} was chosen)"
        if expected.tokens[step] != found.tokens[step]:
            return step, f"expected token {expected.tokens[step]}, found {found.tokens[step]}, from equal logits"
    if len(expected.tokens) != len(found.tokens):
        last = min(len(expected.tokens), len(found.tokens))
        return last, f"expected {len(expected.tokens)} tokens in all, found {len(found.tokens)}"
    if (expected.tokens_sha256, expected.logits_sha256) != (found.tokens_sha256, found.logits_sha256):
        return 0, "the hashes of the whole answer differ, though no step does: the file was changed by hand"
    return None


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of a prompts file: where it stands, and the argument of `Luce.request` that it gives."""

    where: str
    options: Mapping[str, Any]


def read_prompts(path: Path) -> list[PromptLine]:
    """The prompts of a JSON Lines file, each `{"prompt": text}`, `{"messages": [...]}` or `{"tokens": [ids]}`; blank lines are skipped.

    Raises HashFileError with the line's number and what is wrong with it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HashFileError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    prompts = [_read_line(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise HashFileError(f"{path}: expected at least one prompt, found none")
    return prompts


def _read_line(line: str, where: str) -> PromptLine:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise HashFileError(f"{where}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise HashFileError(f"{where}: expected an object, found {type(entry).__name__}")
    if len(entry) != 1 or not set(entry) <= set(PROMPT_KINDS):
        found = ", ".join(map(str, entry)) or "no key"
        raise HashFileError(
            f"{where}: expected one key, {', '.join(PROMPT_KINDS[:-1])} or {PROMPT_KINDS[-1]}, found {found}"
        )
    ((kind, value),) = entry.items()
    wanted = str if kind == "prompt" else list
    if not isinstance(value, wanted) or not value:
        found = type(value).__name__ if value else "an empty one"
        raise HashFileError(f"{where}: {kind}: expected a {'string' if wanted is str else 'list'}, found {found}")
    try:
        if kind == "messages":
            for index, message in enumerate(value):
                plain_message(message, index)
        elif kind == "tokens":
            for index, token in enumerate(value):
                if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                    raise ValueError(f"tokens[{index}]: expected a token id, found {token!r}")
    except ValueError as error:
        raise HashFileError(f"{where}: {error}") from error
    return PromptLine(where, entry)


def _read_prompt_hash(entry: Mapping[str, Any]) -> PromptHash:
    tokens = tuple(int(token) for token in entry["tokens"])
    names = ("prompt_sha256", "tokens_sha256", "logits_sha256")
    digests = {name: str(entry[name]) for name in names}
    for name, digest in digests.items():
        if len(bytes.fromhex(digest)) != 32:
            raise ValueError(f"{name}: expected 64 hexadecimal digits, found {digest!r}")
    steps = str(entry["steps"])
    if len(bytes.fromhex(steps)) != STEP_BYTES * len(tokens):
        raise ValueError(f"steps: expected {2 * STEP_BYTES * len(tokens)} hexadecimal digits, found {len(steps)}")
    if hash_tokens(tokens).hex() != digests["tokens_sha256"]:
        raise ValueError("tokens_sha256 is not the hash of tokens")
    return PromptHash(tokens=tokens, steps=steps, **digests)
