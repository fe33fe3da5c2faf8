"""Parked and loaded again, a model goes on as if nothing had been; what would be lost keeps it from being parked."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyluce import Luce
from pyluce.engine import (
    Event,
    GenerationRequest,
    ParkedError,
    ParkError,
    RequestCancelledError,
    SamplingParams,
    TokenEvent,
    UnparkError,
)
from pyluce.engine.idle import IdlePrompt
from pyluce.engine.stats import Activity
from pyluce.luce import Completion
from pyluce.options import OptionError
from tests.serving.test_prefix_cache import OPTIONS, prompt, run, same
from tests.support.disk import quick_disk  # noqa: F401
from tests.support.models import TEST_SHAPE, model_cache  # noqa: F401
from tests.support.real_model import tiny_model  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cold(tiny_model: Path) -> Iterator[Luce]:  # noqa: F811
    with Luce.load(tiny_model, max_concurrency=1, prefix_cache_mib=0, **OPTIONS) as luce:
        yield luce


def load(model: Path, folder: Path | None, **options: Any) -> Luce:
    return Luce.load(model, **{"max_concurrency": 4, "prefix_cache_mib": 64, "cache_dir": folder, **OPTIONS, **options})


def wait(ready: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


class Running:
    """A request that is read on a thread of its own."""

    def __init__(self, luce: Luce, request: GenerationRequest) -> None:
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self._ticket = luce.submit(request)
        self._request = request
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for event in self._ticket.events():
                self.events.append(event)
        except BaseException as error:
            self.error = error

    @property
    def n_tokens(self) -> int:
        return sum(isinstance(event, TokenEvent) for event in self.events)

    def cancel(self) -> None:
        self._ticket.cancel()

    def result(self) -> Completion:
        self._thread.join(60)
        assert not self._thread.is_alive(), "never answered"
        if self.error is not None:
            raise self.error
        return Completion.collect(self._request, self.events)


def request(n: int, seed: int, max_tokens: int, **options: Any) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt(n, seed=seed), max_tokens=max_tokens, hash_logits=True, ignore_end=True, **options
    )


def test_the_prefix_cache_comes_back(cold: Luce, tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    with load(tiny_model, tmp_path) as luce:
        for shared in (1, 31, 64, 99):
            run(luce, prompt(100), cuts=(shared,), n=1)
        assert luce.park() and not luce.park(), "the second time there is nothing to do"
        stats = luce.stats()
        assert stats.parked and stats.activity is Activity.PARKED and stats.memory == {}
        assert luce.memory_report() == {}
        assert luce.unpark() and not luce.unpark()
        assert luce.stats().parked is None
        for shared in (1, 31, 64, 99):
            second = prompt(100)[:shared] + prompt(60, seed=shared)
            answer = run(luce, second, cuts=(shared,))
            assert answer.timings.cached_tokens == shared
            assert same(answer, run(cold, second, cuts=(shared,)))
        assert luce.stats().invariant_violations == 0


def test_running_requests_go_on_where_they_were(cold: Luce, tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    """Four in slots (one of them in its prompt), two in the queue; parked twice on the way; greedy, drawn and penalised."""
    sampled = SamplingParams(temperature=1.0, top_k=40, seed=3)
    wanted = [
        request(50, 1, 150),
        request(65, 2, 120, sampling=sampled),
        request(130, 3, 100, sampling=SamplingParams(presence_penalty=1.5, repeat_penalty=1.2)),
        request(400, 4, 30),
        request(33, 5, 20),
        request(40, 6, 20, sampling=sampled),
    ]
    expected = [Completion.collect(one, cold.run(one)) for one in wanted]
    with load(tiny_model, tmp_path) as luce:
        running = [Running(luce, one) for one in wanted]
        for at_least in (5, 40):
            wait(lambda n=at_least: running[0].n_tokens >= n)  # type: ignore[misc]
            assert luce.park()
            seen = [one.n_tokens for one in running]
            assert list(tmp_path.glob("*.live"))
            time.sleep(0.05)
            assert seen == [one.n_tokens for one in running], "nothing is computed while parked"
            assert luce.unpark()
            assert not list(tmp_path.glob("*.live"))
        for one, answer in zip(running, expected, strict=True):
            assert same(one.result(), answer)
        assert luce.stats().invariant_violations == 0


@pytest.mark.parametrize("spec", [("lookup",), ("mtp",), ("mtp", "lookup")], ids="+".join)
def test_with_drafts(luce_tiny: Path, tmp_path: Path, spec: tuple[str, ...]) -> None:
    """Parked while drafts are verified; and kept prompts with the draft head's keys, after a restart."""
    wanted = [request(50, 1, 120), request(64, 2, 100, sampling=SamplingParams(temperature=1.0, top_k=40, seed=3))]
    follow = GenerationRequest(
        (*wanted[1].prompt, *prompt(30, seed=9)), max_tokens=30, hash_logits=True, ignore_end=True, cuts=(64,)
    )
    with Luce.load(luce_tiny, max_concurrency=1, prefix_cache_mib=0, verify_width=1, **OPTIONS) as plain:
        expected = [Completion.collect(one, plain.run(one)) for one in (*wanted, follow)]
    drafting = {"spec": spec, "verify_width": 4}
    with load(luce_tiny, tmp_path, **drafting) as luce:
        running = [Running(luce, one) for one in wanted]
        wait(lambda: running[0].n_tokens >= 10)
        luce.park()
        luce.unpark()
        for one, answer in zip(running, expected, strict=False):
            assert same(one.result(), answer)
        Completion.collect(follow, luce.run(follow))
    longer = replace(follow, prompt=(*wanted[1].prompt, *prompt(30, seed=10)))
    seen = []
    for folder, cached in ((tmp_path, (94, 64)), (tmp_path / "fresh", (0, 64))):
        with load(luce_tiny, folder, **drafting) as luce:
            for one, kept in zip((follow, longer), cached, strict=True):
                answer = Completion.collect(one, luce.run(one))
                assert answer.timings.cached_tokens == kept
                assert one is longer or same(answer, expected[-1])
                stats = luce.stats()
                seen.append((stats.decode_steps, stats.decode_rows, answer.step_sha256))
    assert seen[:2] == seen[2:], "the head drafts from kept keys what it drafts from its own"


def test_another_file_in_the_models_place_is_refused(tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    model = tmp_path / "model.gguf"
    model.write_bytes(tiny_model.read_bytes())
    with load(model, tmp_path / "cache") as luce:
        luce.park()
        other = bytearray(tiny_model.read_bytes())
        other[-200] ^= 1
        model.write_bytes(other)
        with pytest.raises(UnparkError, match="found another model; start the server again"):
            luce.unpark()
        assert luce.memory_report() == {}


def test_control_a_running_state_that_is_tampered_with_shows(
    cold: Luce,
    tiny_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyluce.state import store

    take = store.take_live_image

    def spoil(*arguments: Any) -> Any:
        image = take(*arguments)
        image.recurrent[:4000] = 0
        return image

    monkeypatch.setattr(store, "take_live_image", spoil)
    one = request(50, 1, 100)
    with load(tiny_model, tmp_path) as luce:
        running = Running(luce, one)
        wait(lambda: running.n_tokens >= 5)
        luce.park()
        luce.unpark()
        assert not same(running.result(), Completion.collect(one, cold.run(one)))


def test_requests_meanwhile_are_refused_or_bring_it_back(cold: Luce, tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    with load(tiny_model, tmp_path / "a") as luce:
        luce.park()
        with pytest.raises(ParkedError, match="the model is parked .*luce unpark"):
            luce.generate(tokens=list(prompt(20)), max_tokens=2)
        assert luce.tokenize("x") == luce.tokenize("x"), "the vocabulary stays"
        luce.unpark()
        assert same(run(luce, prompt(20)), run(cold, prompt(20)))
    with load(tiny_model, tmp_path / "b", unpark_on_request=True) as luce:
        luce.park()
        assert luce.stats().unparks_on_request
        assert same(run(luce, prompt(20)), run(cold, prompt(20)))
        assert luce.stats().parked is None


def test_without_a_folder_nothing_is_lost_in_silence(cold: Luce, tiny_model: Path) -> None:  # noqa: F811
    with load(tiny_model, None) as luce:
        run(luce, prompt(50), n=1)
        with pytest.raises(ParkError, match="1 entries of the prefix cache would be lost"):
            luce.park()
        running = Running(luce, request(50, 1, 200))
        wait(lambda: running.n_tokens >= 2)
        for discard in (False, True):
            with pytest.raises(ParkError, match="1 requests are running"):
                luce.park(discard=discard)
        assert same(running.result(), (lambda one: Completion.collect(one, cold.run(one)))(request(50, 1, 200)))
        assert luce.park(discard=True) and luce.unpark()
        assert run(luce, prompt(50), n=1).timings.cached_tokens == 0
    with load(tiny_model, None, prefix_cache_mib=0) as luce:
        assert luce.park(), "there is nothing to lose"


def test_a_full_disk_keeps_it_from_being_parked(
    cold: Luce,
    tiny_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyluce.state import store

    one = request(50, 1, 200)
    with load(tiny_model, tmp_path) as luce:
        running = Running(luce, one)
        wait(lambda: running.n_tokens >= 2)
        with monkeypatch.context() as patch:

            def full(*arguments: Any) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(store, "write_entry", full)
            with pytest.raises(ParkError, match="not parked.*No space left"):
                luce.park()
        assert luce.stats().parked is None and not list(tmp_path.glob("*.live*"))
        assert same(running.result(), Completion.collect(one, cold.run(one)))


def test_a_failed_unpark_leaves_everything_released(cold: Luce, tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    model = tmp_path / "moving.gguf"
    model.write_bytes(tiny_model.read_bytes())
    one = request(50, 1, 60)
    with load(model, tmp_path / "cache", unpark_on_request=True) as luce:
        running = Running(luce, one)
        wait(lambda: running.n_tokens >= 5)
        luce.park()
        away = model.rename(tmp_path / "away.gguf")
        with pytest.raises(UnparkError, match="still parked: it could not be loaded again: .*moving.gguf"):
            luce.unpark()
        assert "could not be loaded again" in (luce.stats().parked or "")
        assert luce.memory_report() == {}
        with pytest.raises(UnparkError, match="still parked"):
            run(luce, prompt(20))
        away.rename(model)
        assert luce.unpark()
        assert same(running.result(), Completion.collect(one, cold.run(one)))
        assert luce.stats().invariant_violations == 0


def test_who_leaves_while_parked_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    with load(tiny_model, tmp_path) as luce:
        running = [Running(luce, request(50, seed, 300)) for seed in range(6)]
        wait(lambda: running[0].n_tokens >= 2)
        luce.park()
        for one in running[1:]:
            one.cancel()
        for one in running[1:]:
            with pytest.raises(RequestCancelledError):
                one.result()
        assert len(list(tmp_path.glob("*.live"))) == 1
        luce.unpark()
        assert len(running[0].result().tokens) == 300
        stats = luce.stats()
        assert stats.busy_slots == stats.queue_length == stats.invariant_violations == 0


def test_closed_while_parked(tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    luce = load(tiny_model, tmp_path)
    running = Running(luce, request(50, 1, 300))
    wait(lambda: running.n_tokens >= 2)
    luce.park()
    luce.close()
    with pytest.raises(Exception, match="closed"):
        running.result()
    assert not list(tmp_path.glob("*.live"))


def test_a_damaged_running_state_ends_its_request_only(cold: Luce, tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    wanted = [request(50, seed, 100) for seed in (1, 2)]
    with load(tiny_model, tmp_path) as luce:
        running = [Running(luce, one) for one in wanted]
        wait(lambda: min(one.n_tokens for one in running) >= 3)
        luce.park()
        victim = sorted(tmp_path.glob("*.live"))[0]
        data = bytearray(victim.read_bytes())
        data[-100] ^= 1
        victim.write_bytes(data)
        assert luce.unpark()
        with pytest.raises(UnparkError, match="state could not be read again"):
            running[0].result()
        assert same(running[1].result(), Completion.collect(wanted[1], cold.run(wanted[1])))
        assert luce.stats().invariant_violations == 0 and luce.stats().busy_slots == 0


def test_an_idle_model_parks_itself(cold: Luce, tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(OptionError, match="park_after: expected a cache_dir"):
        load(tiny_model, None, park_after=1.0)
    with load(tiny_model, tmp_path, park_after=0.5, unpark_on_request=True) as luce:
        luce.warm(IdlePrompt(prompt(60)))
        for _ in range(2):
            wait(lambda: luce.stats().parked == "nothing was to do for 0.5 s")
            answer = run(luce, prompt(60) + prompt(10, seed=1), cuts=(60,))
            assert answer.timings.cached_tokens >= 60
            assert same(answer, run(cold, prompt(60) + prompt(10, seed=1), cuts=(60,)))


_RESIDENT = """
import gc, json, sys
from pathlib import Path
import psutil
from pyluce import Luce
from pyluce.native import load_libraries
from pyluce.native.heap import trim_heap
from tests.serving.test_prefix_cache import prompt, run

import pyluce.loading

load_libraries()
with Luce.load(sys.argv[2], max_concurrency=1, threads=1, max_ctx=256):
    pass  # what Python and the libraries keep for good
gc.collect()
trim_heap()
rss = lambda: psutil.Process().memory_info().rss
seen = [rss()]
options = dict(max_concurrency=2, threads=1, max_ctx=2048, prefix_cache_mib=64, cache_dir=Path(sys.argv[3]))
with Luce.load(sys.argv[1], **options) as luce:
    for _ in range(2):
        run(luce, prompt(300), n=2)
        seen.append(rss())
        luce.park()
        seen.append(rss())
        luce.unpark()
    cached = run(luce, prompt(300), n=2).timings.cached_tokens
print(json.dumps({"seen": seen, "cached": cached}))
"""


def test_resident_memory_falls_to_what_it_was_before(model_cache: Any, tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    shape = replace(TEST_SHAPE.with_type("Q8_0"), n_expert=64, n_embd=512, n_ff_exp=192)
    large = model_cache.write("park-large.gguf", shape, 1)
    done = subprocess.run(
        [sys.executable, "-c", _RESIDENT, str(large), str(tiny_model), str(tmp_path)],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    baseline, loaded, parked, loaded_again, parked_again = result["seen"]
    assert loaded > 2 * baseline and loaded_again > 2 * baseline, f"too small a model to show anything: {result}"
    assert parked < 1.05 * baseline and parked_again < 1.05 * baseline, result
    assert result["cached"] == 300
