"""Chat requests that run while a test looks at something else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx


@contextmanager
def asking(url: str, *texts: str) -> Iterator[list[httpx.Response]]:
    """Sends one chat request per text and yields the list that their answers will be in at the end of the block."""
    answers: list[httpx.Response] = []

    def ask(text: str) -> None:
        body = {"messages": [{"role": "user", "content": text}]}
        answers.append(httpx.post(url + "/v1/chat/completions", json=body, timeout=60))

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        for thread in threads:
            thread.join(60)
