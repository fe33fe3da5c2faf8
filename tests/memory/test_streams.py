"""How many streams a plan chooses, over a meter that is easy to add up, and which link it assumes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pyluce.memory.facts import load_published
from pyluce.memory.link import assumed_link, link_json, link_text
from pyluce.memory.load import load_request
from pyluce.memory.machine import DeviceMemory, Machine, MemoryKind
from pyluce.memory.planner import MemoryPlan, Request, largest_fit, make_plan
from pyluce.options import LoadOptions, OptionError
from tests.memory.test_planner import GIB, MIB, SimpleMeter, facts

ASKED = Request(n_ctx=8192, streams=0)


def pair(target: str = "cuda:0", expert: str = "cuda:1", free: int = GIB, there: int = 4 * GIB) -> Machine:
    kind = MemoryKind.CPU if target == "cpu" else MemoryKind.DISCRETE
    return Machine(DeviceMemory(target, kind, free), 64 * GIB, DeviceMemory(expert, MemoryKind.DISCRETE, there))


def plan(request: Request, machine: Machine) -> MemoryPlan:
    return make_plan(facts(), request, machine, SimpleMeter())


def graphs(made: MemoryPlan) -> int:
    return sum(p.n_bytes for p in made.parts if p.what == "graphs")


def test_two_gpus_take_two_streams_in_the_memory_of_one() -> None:
    one, two = plan(replace(ASKED, streams=1), pair()), plan(ASKED, pair())
    assert (one.streams, one.chunk_tokens, one.streams_why) == (1, 8192, None)
    assert (two.streams, two.chunk_tokens) == (2, 4096)
    assert two.streams_why == "two GPUs, and room for two chunks of 4,096 rows"
    assert graphs(one) == graphs(two) == 8192 * 4096 and one.prefix_cache_bytes == two.prefix_cache_bytes > 0
    asked = plan(replace(ASKED, streams=2), pair())
    assert (asked.streams, asked.chunk_tokens, asked.streams_why) == (2, 4096, None)
    shared = plan(replace(ASKED, n_slots=4), pair())
    assert (shared.streams, shared.chunk_tokens) == (2, 2048), "others wait for both chunks"


@pytest.mark.parametrize(
    ("request_", "machine", "why"),
    [
        (ASKED, Machine(DeviceMemory("cuda:0", MemoryKind.DISCRETE, GIB), 64 * GIB), "one device"),
        (ASKED, pair("cpu", "rpc:127.0.0.1:1"), "the host waits for each layer between cpu and rpc:127.0.0.1:1"),
        (ASKED, pair(expert="rpc:127.0.0.1:1"), "the host waits for each layer between cuda:0 and rpc:127.0.0.1:1"),
        (ASKED, pair(expert="hip:0"), "the host waits for each layer between cuda:0 and hip:0"),
        (replace(ASKED, chunk=512), pair(), "chunks of 512 rows, two streams need 1,024"),
        (replace(ASKED, n_ctx=1024), pair(), "half a context of 1,024 tokens, two streams need 1,024"),
        (replace(ASKED, chunk=8192), pair(), "a whole context is one chunk"),
        (replace(ASKED, chunk=4096, n_slots=2), pair(), "two chunks of 4,096 rows would keep other slots waiting"),
    ],
)
def test_one_stream_says_why(request_: Request, machine: Machine, why: str) -> None:
    made, one = plan(request_, machine), plan(replace(request_, streams=1), machine)
    assert made.streams == 1 and made.streams_why is not None and made.streams_why.startswith(why)
    assert (made.chunk_tokens, made.prefix_cache_bytes, made.parts) == (
        one.chunk_tokens,
        one.prefix_cache_bytes,
        one.parts,
    )


@pytest.mark.parametrize("limited", ["target", "expert device", "host"])
def test_a_second_stream_takes_nothing_from_kept_prompts(limited: str) -> None:
    """A chunk of 4,096 rows asked for: 16 MiB of graphs on the target, some 33 on the expert device, a second time for a second stream."""
    request = replace(ASKED, chunk=4096)
    sizes = range(24 * MIB, 160 * MIB, MIB)
    counts = set()
    for size in sizes:
        if limited == "target":
            machine = pair(free=size)
        elif limited == "expert device":
            machine = pair(there=size)
        else:
            machine = pair()
            assert machine.expert is not None
            unified = replace(machine.expert, kind=MemoryKind.UNIFIED)
            machine = replace(machine, expert=unified, host_free_bytes=size)
        try:
            one = plan(replace(request, streams=1), machine)
        except ValueError:
            with pytest.raises(ValueError):
                plan(request, machine)
            continue
        made = plan(request, machine)
        counts.add(made.streams)
        assert made.prefix_cache_bytes == one.prefix_cache_bytes
        if made.streams == 1:
            assert made.parts == one.parts
            assert made.streams_why == "no room for two chunks of 4,096 rows beside kept prompts"
        else:
            assert (
                plan(replace(request, streams=2, prefix_cache_bytes=one.prefix_cache_bytes), machine).parts
                == made.parts
            )
    assert counts == {1, 2}, "one stream where it is tight, two where it is not"


def test_what_would_fit_is_counted_with_one_stream() -> None:
    tight = pair(free=32 * MIB)
    one = replace(ASKED, streams=1)
    assert largest_fit(facts(), ASKED, tight, SimpleMeter()) == largest_fit(facts(), one, tight, SimpleMeter())


def test_auto_is_the_default() -> None:
    options = LoadOptions(device="cuda:0", expert_device="cuda:1")
    assert options.prompt_streams == 0 and load_request(load_published("ud-q4_k_xl"), options).streams == 0
    assert LoadOptions().prompt_streams == 0, "and says nothing without a second device"
    with pytest.raises(OptionError, match="prompt_streams: expected an integer from 0 to 4, found 5"):
        LoadOptions(expert_device="rpc:127.0.0.1:1", prompt_streams=5)


def test_the_link_that_is_assumed() -> None:
    """16 GT/s on 4 lanes, 128b/130b, 85 %; a decoded row of the published model as in docs/two-devices.md."""
    link = assumed_link("hip:1 is not there").carrying(load_published("ud-q4_k_xl").hparams)
    assert link.bytes_s == pytest.approx(4 * 2e9 * 128 / 130 * 0.85) and link.latency_s == 15e-6
    assert (link.row_out_bytes, link.row_back_bytes) == (48 * 4 * (2560 + 10), 48 * 4 * 2560 * 10)
    assert link.row_s == pytest.approx(48 * 2 * 15e-6 + (493_440 + 4_915_200) / link.bytes_s)
    assert link_text(link).startswith(
        "not measured: hip:1 is not there; assumed 6.70 GB/s, 15.0 us a transfer (PCIe 4.0 x4: "
    )
    found = link_json(link)
    assert found is not None and not found["measured"] and found["assumed"] == "PCIe 4.0 x4" and link_json(None) is None
