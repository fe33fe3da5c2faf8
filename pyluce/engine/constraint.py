"""Answers that keep to a grammar: before each choice, the tokens that cannot continue one are ruled out.

Which tokens those are is a function of the grammar and the answer's bytes alone, so a constrained answer is as exact as a free one: greedy
takes the largest allowed logit, sampling draws from the allowed tokens in the same order of steps as always. The library underneath,
llguidance, works on bytes; it is asked never to prefer one split of a text into tokens over another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from pyluce.engine.errors import ConstraintError, RequestError
from pyluce.engine.protocols import Logits
from pyluce.text.schema import SchemaError, object_grammar, schema_grammar
from pyluce.text.tools import Function, ToolFormat, tool_grammar

_REMEMBERED_GRAMMARS: Final = 32


class Constraint(Protocol):
    """What one answer must keep to. Used by one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """Nothing but the end can follow."""

    def begin(self, head: bytes, line_breaks: bool) -> None:
        """The constrained text begins now, with `head` written already. `line_breaks`: one token of nothing else may come first.

        Raises ConstraintError when no allowed text begins with `head`.
        """

    def mask(self, logits: Logits) -> None:
        """Set the logits of tokens that are not allowed next to minus infinity, in a row [n_vocab]."""

    def mask_ends(self, logits: Logits) -> None:
        """Set the logits of the tokens that end an answer to minus infinity: it has not begun yet."""

    def accept(self, token: int) -> None:
        """The token was chosen."""

    def close(self) -> None:
        """Free it."""


ConstraintFactory: TypeAlias = Callable[[], Constraint]


class TokenBytes(Protocol):
    """What the compiler asks about a vocabulary (`pyluce.text.Tokenizer`)."""

    @property
    def n_tokens(self) -> int: ...
    def token_bytes(self, token: int) -> bytes: ...
    def is_end(self, token: int) -> bool: ...


class ConstraintCompiler:
    """Compiles grammars for one vocabulary. The factories that it returns are cheap, immutable and usable from any thread.

    The first use reads every token of the vocabulary, on the thread that owns it, and takes seconds for a large one; `prepare` does it ahead.
    """

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._table: _TokenTable | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def prepare(self) -> None:
        """Read the vocabulary now."""
        self._ready()

    def json_schema(self, schema: Mapping[str, Any], field: str = "schema") -> ConstraintFactory:
        """Answers that are a JSON value of `schema`. Raises RequestError naming the place, as part of `field`, and the keyword."""
        return self._compile(lambda: schema_grammar(schema, field), field)

    def json_object(self, field: str = "response_format") -> ConstraintFactory:
        """Answers that are a JSON object."""
        return self._compile(object_grammar, field)

    def tool_calls(
        self, format: ToolFormat, functions: Mapping[str, Function], *, many: bool = True, field: str = "tools"
    ) -> ConstraintFactory:
        """Answers that are a call of one of `functions`, or with `many` at least one. Raises RequestError."""
        return self._compile(lambda: tool_grammar(format, functions, many=many, field=field), field)

    def _compile(self, write: Callable[[], str], field: str) -> ConstraintFactory:
        try:
            grammar = write()
        except SchemaError as error:
            raise RequestError(str(error)) from error
        table = self._ready()
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = LLMatcher(table.tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
            if matcher.is_error():
                raise RequestError(f"{field}: cannot be kept to: {matcher.get_error().splitlines()[0]}")
            self._compiled[grammar] = matcher
            if len(self._compiled) > _REMEMBERED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return _Factory(table, matcher)

    def _ready(self) -> _TokenTable:
        if self._table is None:
            self._table = _TokenTable(self._tokens)
        return self._table


class GrammarConstraint:
    """A constraint by a grammar."""

    def __init__(self, table: _TokenTable, matcher: LLMatcher) -> None:
        self._table = table
        self._matcher = matcher
        self._line_breaks = False

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped()

    def begin(self, head: bytes, line_breaks: bool) -> None:
        self._line_breaks = line_breaks and not head
        if head:
            tokens = self._table.split(head)
            if not self._matcher.consume_tokens(tokens):
                raise ConstraintError(f"the answer began with {head!r}, which its grammar does not allow")

    def mask(self, logits: Logits) -> None:
        refused = ~np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise ConstraintError(f"the grammar failed: {self._matcher.get_error().splitlines()[0]}")
        bits = np.unpackbits(refused, count=logits.size, bitorder="little").view(np.bool_)
        if self._line_breaks:
            bits[self._table.line_breaks] = False
        np.copyto(logits, -np.inf, where=bits)

    def mask_ends(self, logits: Logits) -> None:
        logits[self._table.ends] = -np.inf

    def accept(self, token: int) -> None:
        line_breaks, self._line_breaks = self._line_breaks, False
        if line_breaks and not self._table.tokens[token].strip(b"\n"):
            return
        if not self._matcher.consume_token(token):
            raise ConstraintError(f"token {token} was chosen, which the grammar does not allow")

    def close(self) -> None:
        pass


class _Factory:
    def __init__(self, table: _TokenTable, matcher: LLMatcher) -> None:
        self._table = table
        self._matcher = matcher

    def __call__(self) -> GrammarConstraint:
        return GrammarConstraint(self._table, self._matcher.deep_copy())


class _TokenTable:
    """A vocabulary as llguidance wants it. A byte that no UTF-8 text holds marks the tokens that are no text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: TokenBytes) -> None:
        ids = range(tokens.n_tokens)
        self.tokens: list[bytes] = [tokens.token_bytes(token) or b"\xff<%d>" % token for token in ids]
        ends = [token for token in ids if tokens.is_end(token)]
        if not ends:
            raise RequestError("this model's vocabulary has no token that ends an answer, so none can be constrained")
        self.eos_token_id = ends[0]
        self.special_token_ids = [token for token in ids if self.tokens[token][0] == 0xFF]
        self.ends: npt.NDArray[np.intp] = np.array(ends)
        self.line_breaks: npt.NDArray[np.intp] = np.array(
            [token for token in ids if not self.tokens[token].strip(b"\n")], dtype=np.intp
        )
        self.tokenizer = LLTokenizer(self, eos_token=ends, slices=LLTokenizer.json_slices())  # type: ignore[arg-type]

    def __call__(self, text: str) -> list[int]:
        """Some tokens that spell `text`; asked for by `split` only."""
        return self.tokenizer.greedy_tokenize(text)

    def split(self, text: bytes) -> list[int]:
        """Some tokens that spell `text`."""
        return self.tokenizer.tokenize_bytes(text)
