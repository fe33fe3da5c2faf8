"""The expert device goes in the middle of an answer: the request fails with a reason, and the next one is right again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pyluce.native.errors import DeviceLostError, NativeError
from pyluce.placement.hot import HotSet
from tests.split.schedule import N_LAYER, OPTIONS, model, tokens
from tests.split.server import RpcServer, free_port
from tests.support.device import only_cpu
from tests.support.models import ModelCache
from tests.support.runs import forced, open_runner

pytestmark = only_cpu

PROMPT, CONTINUATION = tokens(40, 3), tokens(4, 4)


@pytest.fixture
def own_server() -> Iterator[RpcServer]:
    running = RpcServer()
    yield running
    running.kill()


def test_a_step_fails_and_the_next_connects_anew(own_server: RpcServer, model_cache: ModelCache) -> None:
    path = model(model_cache, "Q4_K")
    with open_runner(path, **OPTIONS) as runner:
        expected = forced(runner, runner.new_sequence(), PROMPT, CONTINUATION)
    hot = HotSet(((1, 5),) * N_LAYER)
    with open_runner(path, expert_device=own_server.device, hot_experts=hot, **OPTIONS) as runner:
        state, other = runner.new_sequence(), runner.new_sequence()
        found = forced(runner, state, PROMPT, CONTINUATION)
        assert found.tobytes() == expected.tobytes()
        runner.prefill(other, PROMPT)

        own_server.kill()
        with pytest.raises(DeviceLostError, match="has gone in the middle of a step") as caught:
            runner.decode([(state, 1)])
        assert own_server.device in str(caught.value)
        state.clear()
        for _ in range(2):
            with pytest.raises(NativeError, match="expected `luce rpc-server`"):
                runner.prefill(state, PROMPT)
        report = runner.memory_report()["experts"]
        assert isinstance(report, dict) and report["lost"] is True

        own_server.start()
        again = forced(runner, state, PROMPT, CONTINUATION)
        assert again.tobytes() == expected.tobytes()
        # a sequence that took no part in the failed step goes on
        rows = np.concatenate([runner.decode([(other, token)]) for token in CONTINUATION])
        assert rows.tobytes() == expected[1:].tobytes()
        report = runner.memory_report()["experts"]
        assert isinstance(report, dict) and report["lost"] is False and report["hot_experts"] == 2 * N_LAYER


@pytest.mark.parametrize("n_streams", [1, 3])
def test_it_goes_while_a_prompt_is_computed(own_server: RpcServer, model_cache: ModelCache, n_streams: int) -> None:
    options = {**OPTIONS, "chunk_tokens": 16, "prompt_streams": n_streams}
    with open_runner(model(model_cache, "Q4_K"), expert_device=own_server.device, **options) as runner:
        runner.on_launch = own_server.kill
        state = runner.new_sequence()
        with pytest.raises(DeviceLostError):
            runner.prefill(state, PROMPT)
        assert state.length == 0
        with pytest.raises(RuntimeError, match="a step of this sequence failed"):
            own_server.start()
            runner.on_launch = None
            runner.prefill(state, PROMPT)
        state.clear()
        assert runner.prefill(state, PROMPT) is not None


def test_nobody_there(model_cache: ModelCache) -> None:
    name = f"rpc:127.0.0.1:{free_port()}"
    with pytest.raises(
        NativeError, match=r"expected `luce rpc-server` of this version at 127\.0\.0\.1:\d+, found none"
    ):
        with open_runner(model(model_cache, "Q4_K"), expert_device=name, **OPTIONS):
            pass
