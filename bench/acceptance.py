"""How often luce-tiny's own drafts are right, by kind of text and depth: python -m bench.acceptance [--tokens N]

Greedy text, seven drafts a step. The second table is the same head with its hidden row normalised stream by stream, as libllama does it;
the text is the same, since no draft can change it. Counts, not times.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from pyluce.graph import RunnerOptions, TrunkRunner
from pyluce.native.vocabulary import Vocabulary
from pyluce.options import DEFAULT_MODEL
from pyluce.text import Tokenizer

N_DRAFTS = 7
PROMPTS = {
    "prose": (
        "In the beginning",
        "The history of the city begins with",
        "And it came to pass in those days, that",
    ),
    "code-like": (
        "import os\nimport sys\n\ndef main(argv):\n    parser = argparse.ArgumentParser()\n",
        "static int read_file(const char *path)\n{\n\tint fd = open(path, O_RDONLY);\n",
        "SYNOPSIS\n       git log [<options>] [<revision range>]\n\nDESCRIPTION\n",
    ),
    "repetitive": (
        "one two three four one two three four one two three four one two",
        "a,b,c,1\na,b,c,2\na,b,c,3\na,b,c,4\na,b,c,",
        "yes no yes no yes no yes no yes",
    ),
}


def steps(runner: TrunkRunner, prompt: list[int], n_tokens: int) -> Iterator[int]:
    """Accepted drafts of each step of a greedy answer."""
    state = runner.new_sequence()
    try:
        last = runner.prefill(state, prompt)
        assert last is not None
        token, done = int(last.argmax()), 1
        while done < n_tokens:
            drafts = runner.draft([(state, token, N_DRAFTS)])[0]
            rows = runner.decode([(state, t) for t in (token, *drafts)])
            chosen = [int(row.argmax()) for row in rows]
            right = next((i for i, draft in enumerate(drafts) if draft != chosen[i]), N_DRAFTS)
            if right < N_DRAFTS:
                state.rollback(N_DRAFTS - right)
            token, done = chosen[right], done + right + 1
            yield right
    finally:
        state.free()


def table(model: Path, n_tokens: int, fault: str | None) -> list[str]:
    """A line for each kind of text."""
    lines = []
    options = RunnerOptions(n_ctx=n_tokens + 128, mtp=True, max_rollback=N_DRAFTS, debug_fault=fault)
    with TrunkRunner(model, options) as runner, closing(Vocabulary(model)) as vocabulary:
        tokenizer = Tokenizer(vocabulary)
        for kind, prompts in PROMPTS.items():
            found = [a for text in prompts for a in steps(runner, tokenizer.encode_text(text), n_tokens)]
            rates = []
            for depth in range(1, N_DRAFTS + 1):
                reached = sum(accepted >= depth - 1 for accepted in found)
                rates.append(f"{sum(a >= depth for a in found) / reached:.2f}" if reached else "-")
            lines.append(f"| {kind} | {' | '.join(rates)} | {sum(found) / len(found) + 1:.2f} |")
    return lines


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200)
    n_tokens = parser.parse_args().tokens
    for title, fault in (("norm over all streams", None), ("norm stream by stream", "stream_norm")):
        print(f"\n{title}, {n_tokens} tokens of each of {len(PROMPTS['prose'])} texts a kind\n")
        print(f"| text | {' | '.join(f'depth {d}' for d in range(1, N_DRAFTS + 1))} | tokens a step |")
        print("|---" * (N_DRAFTS + 2) + "|")
        print("\n".join(table(DEFAULT_MODEL, n_tokens, fault)))


if __name__ == "__main__":
    main()
