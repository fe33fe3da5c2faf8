"""Clients that keep a completion server busy: closed loops over raw connections, so that they take little time from the server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

ANSWER_TOKENS = 64
REQUEST_S = 300.0
HEALTH_INTERVAL_S = 0.1


@dataclass(frozen=True)
class Job:
    """What every request is: a text of `words` (from, to) random words, with a logit bias."""

    words: tuple[int, int]
    logit_bias: dict[str, float]


@dataclass(frozen=True)
class Server:
    """A running server; `name` is "pyluce" or "upstream"."""

    name: str
    port: int
    process: psutil.Process


@dataclass
class Load:
    """What one run of one server showed. Times in seconds, `window` from the first request to the end of the last."""

    clients: int
    window: float = 0.0
    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    lost: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    stream_rates: list[float] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    @property
    def throughput(self) -> float:
        """Generated tokens a second, all streams together."""
        return self.tokens / self.window


async def measure(server: Server, clients: int, seconds: float, seed: int, job: Job) -> Load:
    """`clients` closed loops for `seconds`; running requests may end after that."""
    load = Load(clients)
    random_texts = random.Random(seed)
    stop = asyncio.Event()
    pulse = asyncio.ensure_future(watch_health(server.port, load, stop))
    before = cpu_seconds(server.process)
    begin = time.perf_counter()
    end = begin + seconds

    async def client() -> None:
        while time.perf_counter() < end:
            words = " ".join(random_word(random_texts) for _ in range(random_texts.randint(*job.words)))
            try:
                await asyncio.wait_for(ask(server, words, load, job), REQUEST_S)
            except (OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
                load.lost.append(f"{type(error).__name__}: {error}")

    await asyncio.gather(*(client() for _ in range(clients)))
    load.window = time.perf_counter() - begin
    load.cpu_s = cpu_seconds(server.process) - before
    stop.set()
    await pulse
    return load


async def ask(server: Server, text: str, load: Load, job: Job) -> None:
    """One streamed completion. ValueError when it is not whole."""
    body: dict[str, Any] = {
        "prompt": text,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "logit_bias": job.logit_bias,
    }
    body["stream_options"] = {"include_usage": True}
    if server.name == "upstream":
        body["cache_prompt"] = False
    begin = time.perf_counter()
    reader, writer = await send(server.port, "POST", "/v1/completions", json.dumps(body).encode())
    first = last = 0.0
    usage: dict[str, Any] | None = None
    try:
        status = (await reader.readline()).split()[1]
        done = False
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                done = True
                break
            if not line.startswith(b"data: "):
                if status != b"200" and line.startswith(b"{"):
                    raise ValueError(f"status {status.decode()}: {line.decode()[:200]}")
                continue
            if b'"usage":{' in line:
                usage = json.loads(line[6:])["usage"]
            elif not first and json.loads(line[6:])["choices"][0]["text"]:
                first = last = time.perf_counter()
            else:
                last = time.perf_counter()
    finally:
        writer.close()
    if not done or usage is None or usage["completion_tokens"] != ANSWER_TOKENS:
        raise ValueError(f"expected {ANSWER_TOKENS} tokens, [DONE] and usage, found {usage}, status {status.decode()}")
    load.requests += 1
    load.tokens += usage["completion_tokens"]
    load.prompt_tokens += usage["prompt_tokens"]
    load.first.append(first - begin)
    if last > first:
        load.stream_rates.append((usage["completion_tokens"] - 1) / (last - first))


async def watch_health(port: int, load: Load, stop: asyncio.Event) -> None:
    """Ask /health all the time and note how long the answer takes."""
    while not stop.is_set():
        begin = time.perf_counter()
        reader, writer = await send(port, "GET", "/health")
        status = await reader.readline()
        load.health_ms.append(1000.0 * (time.perf_counter() - begin))
        writer.close()
        if b" 200 " not in status:
            load.lost.append(f"/health: {status!r}")
        await asyncio.sleep(HEALTH_INTERVAL_S)


async def send(
    port: int, method: str, path: str, body: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


def random_word(source: random.Random) -> str:
    """A made-up word: a few syllables."""
    return "".join(source.choice("bcdfglmnprst") + source.choice("aeiou") for _ in range(source.randint(1, 4)))


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of all threads so far."""
    times = process.cpu_times()
    return float(times.user + times.system)
