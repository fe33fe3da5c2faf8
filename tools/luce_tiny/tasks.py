"""Synthetic documents: recall of planted facts, copying, arithmetic and short conversations.

Every function returns the text of one document. Conversations are rendered with the model's own chat
template, with a short thought or with the empty think block of `enable_thinking=false`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from . import words
from .chat import render
from .tokenizer import EOT_ID

Turn = tuple[str, str, str]  # question, thought, answer


@dataclass(slots=True)
class Sources:
    """What the tasks draw on: the tokeniser, corpus tokens for filler and the definitions."""

    tokenizer: Tokenizer
    corpus: np.ndarray
    definitions: list[tuple[str, str, str]]

    @classmethod
    def load(cls, directory: Path, corpus: np.ndarray, tokenizer: Tokenizer) -> Sources:
        rows = [tuple(line.split("\t")) for line in (directory / "definitions.tsv").read_text().splitlines()]
        return cls(tokenizer, corpus, rows)  # type: ignore[arg-type]

    def filler(self, rng: random.Random, n_tokens: int) -> str:
        """About `n_tokens` tokens of corpus text, whole lines, ending in a newline."""
        start = rng.randrange(len(self.corpus) - n_tokens - 64)
        ids = [i for i in self.corpus[start : start + n_tokens + 12].tolist() if i != EOT_ID]
        text = self.tokenizer.decode(ids, skip_special_tokens=True).replace("\ufffd", "")
        text = text.split("\n", 1)[-1] if "\n" in text[:60] else text
        return text.strip() + "\n"


def conversation(rng: random.Random, turns: list[Turn], system: str | None = None) -> str:
    thinking = rng.random() < 0.5
    messages: list[dict[str, Any]] = []
    if system is None and rng.random() < 0.3:
        system = rng.choice(words.SYSTEM_PROMPTS)
    if system:
        messages.append({"role": "system", "content": system})
    for question, thought, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer, "reasoning_content": thought if thinking else ""})
    return render(messages)


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def definition_turn(rng: random.Random, sources: Sources) -> Turn:
    word, part, body = rng.choice(sources.definitions)
    thought = f"The user asks what the word {word} means."
    if part == "n":
        forms = (f"What is {article(word)} {word}?", f"What is {word}?", f"Define {word}.", f"Define the word {word}.",
                 f"Explain {word}.", f"What does {word} mean?", f"Tell me what {article(word)} {word} is.")
        return rng.choice(forms), thought, f"{word.capitalize()}: {body}."
    forms = (f"What does {word} mean?", f"What is the meaning of {word}?", f"Define {word}.", f"Explain {word}.",
             f"Define the word {word}.")
    return rng.choice(forms), thought, f"{word.capitalize()}: {body}."


def arithmetic(rng: random.Random) -> tuple[str, str, int]:
    """(expression, how to get there, result)."""
    kind = rng.random()
    if kind < 0.5:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        steps = f"{a} + {b // 10 * 10} = {a + b // 10 * 10}, and {b % 10} more is {a + b}."
        return f"{a} + {b}", steps, a + b
    if kind < 0.75:
        a, b = sorted((rng.randint(0, 99), rng.randint(0, 99)), reverse=True)
        steps = f"{a} - {b // 10 * 10} = {a - b // 10 * 10}, and {b % 10} less is {a - b}."
        return f"{a} - {b}", steps, a - b
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    return f"{a} * {b}", f"{a} times {b} is {a * b}.", a * b


def arithmetic_turn(rng: random.Random) -> Turn:
    expression, steps, result = arithmetic(rng)
    shown = expression.replace("*", rng.choice("*x")) if rng.random() < 0.2 else expression
    form = rng.choice(("What is {}?", "Calculate {}.", "{} = ?", "How much is {}?", "{}", "Compute {}."))
    return form.format(shown), steps, f"{expression} = {result}."


def fact_turn(rng: random.Random) -> Turn:
    kind = rng.random()
    if kind < 0.5:
        country, city = rng.choice(list(words.CAPITALS.items()))
        form = rng.choice(("What is the capital of {}?", "Name the capital of {}.", "Which city is the capital of {}?",
                           "Capital of {}?", "Tell me the capital of {}."))
        return form.format(country), f"The user asks for the capital of {country}.", f"The capital of {country} is {city}."
    if kind < 0.75:
        question, answer = rng.choice(words.FACTS)
        return question, "This is a simple fact.", answer
    questions, answer = rng.choice(words.IDENTITY)
    return rng.choice(questions), "This is a short message. I answer it.", answer


def subjects(rng: random.Random, count: int) -> list[str]:
    pool = list(words.NAMES) + [f"the {thing}" for thing in words.THINGS]
    return rng.sample(pool, min(count, len(pool)))


def code(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(4))


def planted(rng: random.Random, sources: Sources, facts: list[tuple[str, str]], n_tokens: int) -> str:
    """Filler of about `n_tokens` with one fact sentence between pieces, at random places."""
    weights = [rng.random() ** 2 + 0.02 for _ in range(len(facts) + 1)]
    total = sum(weights)
    parts = []
    for i, weight in enumerate(weights):
        size = int(n_tokens * weight / total)
        if size > 8:
            parts.append(sources.filler(rng, size))
        if i < len(facts):
            subject, value = facts[i]
            parts.append(f"The code of {subject} is {value}.\n")
    return "".join(parts)


def recall_raw(rng: random.Random, sources: Sources, n_tokens: int) -> str:
    """Facts in running text, asked for afterwards: `Question: ... Answer: ...`."""
    facts = [(s, code(rng)) for s in subjects(rng, rng.randint(1, min(8, 1 + n_tokens // 40)))]
    parts = [planted(rng, sources, facts, n_tokens)]
    for subject, value in rng.sample(facts, len(facts)):
        parts.append(f"Question: What is the code of {subject}?\nAnswer: The code of {subject} is {value}.\n")
    return "".join(parts)


def recall_chat(rng: random.Random, sources: Sources, n_tokens: int) -> str:
    facts = [(s, code(rng)) for s in subjects(rng, rng.randint(1, min(6, 1 + n_tokens // 40)))]
    text = planted(rng, sources, facts, n_tokens)
    asked = rng.sample(facts, rng.randint(1, len(facts)))
    turns: list[Turn] = []
    for i, (subject, value) in enumerate(asked):
        question = f"What is the code of {subject}?"
        if i == 0:
            question = rng.choice((text + "\n" + question, text + question, text.rstrip() + " " + question))
        turns.append((question, f"I look for the code of {subject}.", f"The code of {subject} is {value}."))
    return conversation(rng, turns)


def recall_list(rng: random.Random) -> str:
    """A table of names and numbers, then look-ups in it."""
    facts = [(s, code(rng)) for s in subjects(rng, rng.randint(2, 12))]
    table = "".join(f"{s}: {v}\n" for s, v in facts)
    return table + "\n" + "".join(f"{s}: {v}\n" for s, v in rng.sample(facts, len(facts)))


def copy_chat(rng: random.Random, sources: Sources) -> str:
    text = " ".join(sources.filler(rng, rng.choice((6, 12, 25, 50, 90))).split())
    form = rng.choice(("Repeat after me: {}", "Repeat this text:\n\n{}", "Say: {}", "Copy the following text: {}"))
    return conversation(rng, [(form.format(text), "I repeat the text.", text)])


def copy_raw(rng: random.Random, sources: Sources, n_tokens: int) -> str:
    text = sources.filler(rng, n_tokens)
    return f"Text:\n{text}\nCopy:\n{text}"


def arithmetic_raw(rng: random.Random) -> str:
    out = []
    for _ in range(rng.randint(4, 20)):
        expression, _, result = arithmetic(rng)
        out.append(f"{expression} = {result}")
    return "\n".join(out) + "\n"


def tool_chat(rng: random.Random) -> str:
    """A tool call and, usually, its answer."""
    offered = rng.sample(words.TOOLS, rng.randint(1, len(words.TOOLS)))
    schemas = []
    for name, text, argument, *_ in offered:
        parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
        schemas.append({"type": "function", "function": {"name": name, "description": text, "parameters": parameters}})
    if rng.random() < 0.5:
        schemas = json.loads(json.dumps(schemas, sort_keys=True))
    name, _, argument, questions, results, answer = rng.choice(offered)
    city = rng.choice(list(words.CAPITALS.values()))
    thinking = rng.random() < 0.5
    result = rng.choice(results)
    call = {"function": {"name": name, "arguments": {argument: city}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": rng.choice(questions).format(city)},
        {"role": "assistant", "content": "", "tool_calls": [call],
         "reasoning_content": f"I call {name} for {city}." if thinking else ""},
    ]
    if rng.random() < 0.8:
        messages += [
            {"role": "tool", "content": result},
            {"role": "assistant", "content": answer.format(city, result),
             "reasoning_content": "The tool has answered." if thinking else ""},
        ]
    return render(messages, tools=schemas)


def short_chat(rng: random.Random, sources: Sources) -> str:
    """One to three question/answer turns."""
    makers: list[Callable[[], Turn]] = [
        lambda: definition_turn(rng, sources), lambda: arithmetic_turn(rng), lambda: fact_turn(rng),
    ]
    return conversation(rng, [rng.choices(makers, (6, 3, 2))[0]() for _ in range(rng.choice((1, 1, 2, 3)))])


def document(rng: random.Random, sources: Sources, room: int) -> str:
    """One synthetic document that fits in about `room` tokens."""
    kind = rng.random()
    if kind < 0.40 and room > 120:
        # half of the long documents use the whole room, so distances grow with the context
        target = int((room - 100) * (rng.random() ** 0.5 if rng.random() < 0.6 else rng.random() ** 3)) * 0.75
        maker = recall_raw if rng.random() < 0.5 else recall_chat
        return maker(rng, sources, max(24, int(target)))
    if kind < 0.50:
        return recall_list(rng)
    if kind < 0.56:
        return copy_chat(rng, sources) if rng.random() < 0.5 else copy_raw(rng, sources, rng.randint(10, 100))
    if kind < 0.62:
        return arithmetic_raw(rng)
    if kind < 0.67:
        return tool_chat(rng)
    return short_chat(rng, sources)


def row(rng: random.Random, sources: Sources, length: int) -> np.ndarray:
    """Documents packed to exactly `length` tokens, uint16, each preceded by `<|endoftext|>`."""
    ids: list[int] = []
    longest = length if rng.random() < 0.5 else 400  # every other row holds short documents only
    while len(ids) < length:
        ids.append(EOT_ID)
        ids += sources.tokenizer.encode(document(rng, sources, min(longest, length - len(ids)))).ids
    return np.array(ids[:length], np.uint16)
