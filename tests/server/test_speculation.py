"""What /props and /metrics say of speculation is what the answers' usage says, on the model that ships with the package."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyluce.luce import Luce
from pyluce.options import LoadOptions
from pyluce.speculation import WOULD_NOT_PAY
from tests.server.test_numbers import scrape
from tests.support.echo_service import running_server
from tests.support.real_model import require_libraries

OPTIONS = LoadOptions(max_ctx=512, threads=1, chunk=64, max_concurrency=1, prefix_cache_mib=0, verify_width=4)
BODY: dict[str, Any] = {"prompt": "The purpose of this command is", "max_tokens": 40}


def test_props_and_metrics_add_up() -> None:
    require_libraries()
    with Luce.load_with(None, OPTIONS) as luce, running_server(luce, OPTIONS) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            usage = client.post("/v1/completions", json=BODY).json()["usage"]
            shown, sample = client.get("/props").json(), scrape(client)
    found = shown["speculative"]
    assert shown["speculative_mode"] == "mtp"
    assert found["verify_width"] == 4
    assert found["mtp"] == {"enabled": True, "reason": None, "path": shown["model"]["draft_path"]}
    assert shown["model"]["draft_path"] == str(luce.info.path)
    steps = sum(found["steps_by_width"].values())
    assert usage["completion_tokens"] == 1 + steps + found["accepted"]
    assert found["accepted"] == sum(found["by_source"]["mtp"]["accepted"]) > 10
    assert found["drafted"] == sum(int(w) * n for w, n in found["steps_by_width"].items()) - steps
    assert sample["luce_drafted_tokens_total", ("mtp",)] == found["drafted"]
    for depth in (1, 2, 3):
        reached, accepted = (found["by_source"]["mtp"][name][depth - 1] for name in ("reached", "accepted"))
        assert sample["luce_accepted_drafts_total", (str(depth), "mtp")] == accepted
        assert sample["luce_reached_drafts_total", (str(depth), "mtp")] == reached >= accepted
    assert sample["luce_verify_steps_total", ("4",)] == found["steps_by_width"]["4"]
    assert sample["luce_decode_steps_total", ()] == steps
    assert sample["luce_decode_rows_total", ()] == steps + found["drafted"]


@pytest.mark.parametrize(
    ("options", "mode", "reason"),
    [
        ({}, "off", WOULD_NOT_PAY),
        ({"verify_width": 1}, "off", "verify_width is 1"),
        ({"spec": ("lookup",)}, "lookup", "spec does not name it"),
        ({"spec": ()}, "off", "spec does not name it"),
        ({"spec": ("mtp", "lookup")}, "mtp+lookup", None),
    ],
)
def test_props_say_why_the_head_is_not_used(options: dict[str, Any], mode: str, reason: str | None) -> None:
    require_libraries()
    given = replace(OPTIONS, **{"verify_width": 0, **options})
    with Luce.load_with(None, given) as luce, running_server(luce, given) as server:
        shown = httpx.get(server.url + "/props").json()
    assert shown["speculative_mode"] == mode
    assert shown["speculative"]["enabled"] == (mode != "off")
    assert shown["speculative"]["mtp"]["reason"] == reason
    assert shown["model"]["draft_path"] == (None if reason else str(luce.info.path))


def test_a_model_without_a_head(tiny_model: Path) -> None:
    with Luce.load_with(tiny_model, OPTIONS) as luce, running_server(luce, OPTIONS) as server:
        shown = httpx.get(server.url + "/props").json()
    assert shown["speculative_mode"] == "off"
    assert shown["speculative"]["mtp"]["reason"] == "the file has no MTP block"
