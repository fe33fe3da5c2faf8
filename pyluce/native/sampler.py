"""libllama's sampler chain: chooses a token from a row of logits."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyluce.native import llama, log
from pyluce.native.errors import NativeError
from pyluce.native.library import load_libraries
from pyluce.native.llama import LLAMA_DEFAULT_SEED, llama_logit_bias, llama_token_data, llama_token_data_array
from pyluce.native.owner import Owner
from pyluce.native.thread import owned_by_thread
from pyluce.native.vocabulary import Vocabulary

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class SamplerChain(Owner):
    """Steps that filter and rescale a row of logits and, last, choose a token (``greedy`` or ``draw``).

    ``n_vocab``: length of a row. ``vocabulary`` is needed for ``grammar`` only and stays open longer than the chain.
    """

    def __init__(self, n_vocab: int, vocabulary: Vocabulary | None = None) -> None:
        super().__init__()
        if n_vocab <= 0:
            raise ValueError(f"expected a positive vocabulary size, found {n_vocab}")
        load_libraries()
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        self._adopt("llama_sampler_chain_init", chain, n_vocab, vocabulary)

    def _adopt(self, constructor: str, chain: int | None, n_vocab: int, vocabulary: Vocabulary | None) -> None:
        self._own(constructor, chain, llama.llama_sampler_free, parent=vocabulary)
        self.n_vocab = n_vocab
        self._vocabulary = vocabulary
        self._grammars: list[int] = []
        self._candidates = np.zeros(n_vocab, dtype=_CANDIDATE)
        self._ids = np.arange(n_vocab, dtype=np.int32)

    def add(self, name: str, *arguments: Any) -> None:
        """Append a step by name:

        ``logit_bias`` ({token: bias}), ``penalties`` (window, repeat, frequency, presence), ``grammar`` (gbnf, root),
        ``top_k`` (k), ``top_p`` (p), ``min_p`` (p), ``temperature`` (t), ``draw`` (seed), ``greedy`` ().
        """
        steps: dict[str, Callable[..., None]] = {
            "logit_bias": self.add_logit_bias,
            "penalties": self.add_penalties,
            "grammar": self.add_grammar,
            "top_k": self.add_top_k,
            "top_p": self.add_top_p,
            "min_p": self.add_min_p,
            "temperature": self.add_temperature,
            "draw": self.add_draw,
            "greedy": self.add_greedy,
        }
        if name not in steps:
            raise ValueError(f"expected a sampler step among {', '.join(steps)}, found {name!r}")
        steps[name](*arguments)

    def add_greedy(self) -> None:
        """Choose the largest logit; of equal ones the first candidate (the lowest id unless a step sorted them)."""
        self._append("llama_sampler_init_greedy", llama.llama_sampler_init_greedy())

    def add_draw(self, seed: int) -> None:
        """Draw by probability with a generator of that seed (0 to 2**32 - 2; 2**32 - 1 means "random" to libllama)."""
        if not 0 <= seed < LLAMA_DEFAULT_SEED:
            raise ValueError(f"expected a seed from 0 to {LLAMA_DEFAULT_SEED - 1}, found {seed}")
        self._append("llama_sampler_init_dist", llama.llama_sampler_init_dist(seed))

    def add_top_k(self, k: int) -> None:
        """Keep the k largest logits; 0 keeps all."""
        if not 0 <= k < 2**31:
            raise ValueError(f"expected k from 0 to {2**31 - 1}, found {k}")
        self._append("llama_sampler_init_top_k", llama.llama_sampler_init_top_k(k))

    def add_top_p(self, p: float, min_keep: int = 1) -> None:
        """Keep the smallest set of tokens whose probability reaches p, at least ``min_keep``."""
        self._append("llama_sampler_init_top_p", llama.llama_sampler_init_top_p(_fraction("p", p), _count(min_keep)))

    def add_min_p(self, p: float, min_keep: int = 1) -> None:
        """Keep the tokens at least p times as probable as the most probable one, at least ``min_keep``."""
        self._append("llama_sampler_init_min_p", llama.llama_sampler_init_min_p(_fraction("p", p), _count(min_keep)))

    def add_temperature(self, temperature: float) -> None:
        """Divide the logits; 0 keeps only the largest."""
        if not (math.isfinite(temperature) and temperature >= 0.0):
            raise ValueError(f"expected a finite temperature of at least 0, found {temperature}")
        self._append("llama_sampler_init_temp", llama.llama_sampler_init_temp(temperature))

    def add_penalties(self, window: int, repeat: float = 1.0, frequency: float = 0.0, presence: float = 0.0) -> None:
        """Penalise tokens among the last ``window`` accepted: divide or multiply by ``repeat`` (1 is off), subtract
        ``frequency`` for each occurrence and ``presence`` once (0 is off)."""
        if not 0 <= window < 2**31:
            raise ValueError(f"expected a window from 0 to {2**31 - 1}, found {window}")
        if not (math.isfinite(repeat) and repeat > 0.0 and math.isfinite(frequency) and math.isfinite(presence)):
            raise ValueError(
                f"expected repeat > 0 and finite penalties, found repeat {repeat}, frequency {frequency}, "
                f"presence {presence}"
            )
        step = llama.llama_sampler_init_penalties(self.n_vocab, window, repeat, frequency, presence)
        self._append("llama_sampler_init_penalties", step)

    def add_logit_bias(self, biases: Mapping[int, float]) -> None:
        """Add to the logits of some tokens."""
        for token, bias in biases.items():
            self._check_token(token)
            if math.isnan(bias):
                raise ValueError(f"expected a number as the bias of token {token}, found NaN")
        pairs = (llama_logit_bias * len(biases))(*(llama_logit_bias(token, bias) for token, bias in biases.items()))
        step = llama.llama_sampler_init_logit_bias(self.n_vocab, len(biases), pairs)
        self._append("llama_sampler_init_logit_bias", step)

    def add_grammar(self, grammar: str, root: str = "root") -> None:
        """Allow only tokens that continue a text of the GBNF grammar; NativeError for one that does not parse."""
        if self._vocabulary is None:
            raise ValueError("expected a chain made with a vocabulary for a grammar step, found none")
        if not grammar.strip():
            raise ValueError("expected a GBNF grammar, found an empty text")
        step = llama.llama_sampler_init_grammar(self._vocabulary.vocab_ptr, grammar.encode(), root.encode())
        self._append("llama_sampler_init_grammar", step)
        self._grammars.append(step or 0)

    @property
    def steps(self) -> list[str]:
        """libllama's names of the steps; one that does nothing begins with "?"."""
        chain = self.ptr
        found = [llama.llama_sampler_chain_get(chain, i) for i in range(llama.llama_sampler_chain_n(chain))]
        return [llama.llama_sampler_name(step).decode() for step in found if step]

    @owned_by_thread
    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose a token from a row [n_vocab] (which is not changed) and accept it."""
        token = self.choose(logits)
        self.accept(token)
        return token

    @owned_by_thread
    def choose(self, logits: NDArray[np.float32]) -> int:
        """Choose a token from a row [n_vocab] without accepting it. A ``draw`` step's generator advances.

        Raises ValueError for a row of another length or with NaN; NativeError when no step chose, or every candidate
        was ruled out.
        """
        array = self.apply(logits)
        if not 0 <= array.selected < array.size:
            raise NativeError(
                f"expected a chain whose last step chooses a token (greedy or draw), found {self.steps or 'no steps'}"
            )
        chosen = array.data[array.selected]
        if chosen.logit == -math.inf:
            raise NativeError(f"expected a candidate that the steps {self.steps} allow, found none", log.take())
        return int(chosen.id)

    @owned_by_thread
    def apply(self, logits: NDArray[np.float32]) -> llama_token_data_array:
        """Run the steps over a row [n_vocab]; the result is valid until the next call."""
        chain = self.ptr
        if logits.shape != (self.n_vocab,):
            raise ValueError(f"expected a row of {self.n_vocab} logits, found numpy shape {logits.shape}")
        if np.isnan(logits).any():
            raise ValueError(f"expected logits without NaN, found {int(np.isnan(logits).sum())} of {logits.size}")
        self._candidates["id"] = self._ids
        self._candidates["logit"] = logits
        self._candidates["p"] = 0.0
        data = ctypes.cast(self._candidates.ctypes.data, ctypes.POINTER(llama_token_data))
        array = llama_token_data_array(data, self.n_vocab, -1, False)
        llama.llama_sampler_apply(chain, ctypes.byref(array))
        return array

    @owned_by_thread
    def accept(self, token: int) -> None:
        """Tell every step that the token is part of the text; ValueError for one that the grammar rules out."""
        chain = self.ptr
        self._check_token(token)
        if not all(self._allows(grammar, token) for grammar in self._grammars):
            raise ValueError(f"expected a token that the grammar allows, found {token}")
        llama.llama_sampler_accept(chain, token)

    @owned_by_thread
    def reset(self) -> None:
        """Forget what was accepted and start the generators again from their seeds."""
        llama.llama_sampler_reset(self.ptr)

    @owned_by_thread
    def clone(self) -> SamplerChain:
        """An independent chain in the same state: accepted tokens, generators, grammar."""
        copy = SamplerChain.__new__(SamplerChain)
        Owner.__init__(copy)
        copy._adopt("llama_sampler_clone", llama.llama_sampler_clone(self.ptr), self.n_vocab, self._vocabulary)
        chain = copy.ptr
        found = [llama.llama_sampler_chain_get(chain, i) for i in range(llama.llama_sampler_chain_n(chain))]
        copy._grammars = [step for step in found if step and llama.llama_sampler_name(step) == b"grammar"]
        return copy

    def _append(self, constructor: str, step: int | None) -> None:
        if not step:
            raise NativeError(f"{constructor} returned NULL", log.take())
        llama.llama_sampler_chain_add(self.ptr, step)

    def _check_token(self, token: int) -> None:
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"expected a token id from 0 to {self.n_vocab - 1}, found {token}")

    @staticmethod
    def _allows(grammar: int, token: int) -> bool:
        """libllama ends the process when a grammar is made to accept what it does not allow, so it is asked first."""
        one = llama_token_data(token, 0.0, 0.0)
        array = llama_token_data_array(ctypes.pointer(one), 1, -1, False)
        llama.llama_sampler_apply(grammar, ctypes.byref(array))
        return bool(one.logit != -math.inf)


def _fraction(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"expected {name} from 0 to 1, found {value}")
    return value


def _count(value: int) -> int:
    if value < 0:
        raise ValueError(f"expected a count of at least 0, found {value}")
    return value
