"""The link in plans: measured where both devices are there, and printed when a model is loaded on them."""

from __future__ import annotations

import json
import re

import pytest

from cli.main import main
from pyluce.memory import link
from pyluce.memory.link import PCIE4_LANE_BYTES_S, look_at_link
from pyluce.native.errors import NativeError
from tests.split.server import RpcServer, free_port
from tests.support.device import only_cpu

pytestmark = only_cpu


def luce(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    assert main((*arguments, "--threads", "1")) == 0
    found = capsys.readouterr()
    return found.out, found.err


def test_a_plan_measures_the_link(server: RpcServer, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = luce(capsys, "plan", "--expert-device", server.device, "--json")
    found = json.loads(out)["link"]
    assert found["measured"] and found["why_not_measured"] is None and found["assumed"] is None
    assert 0 < found["latency_s"] < 1 and 1e6 < found["bytes_s"] < 1e13 and found["peer_access"] is False
    moved = found["row_out_bytes"] + found["row_back_bytes"]
    assert found["row_s"] == pytest.approx(2 * 8 * found["latency_s"] + moved / found["bytes_s"])
    out, _ = luce(capsys, "plan", "--expert-device", server.device)
    speed = re.search(r"^link      ([\d,.]+) GB/s, ([\d,.]+) us a transfer, measured$", out, re.MULTILINE)
    assert speed is not None and all(float(text.replace(",", "")) > 0 for text in speed.groups())
    assert "          a decoded row sends 8.3 kB and gets 32.8 kB where no expert is hot: " in out


def test_what_a_run_says(server: RpcServer, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = luce(capsys, "run", "--dry-run", "--json", "--expert-device", server.device)
    assert json.loads(out)["plan"]["link"]["measured"]
    run = ("run", "-p", "x", "-n", "1", "--max-ctx", "256", "--expert-device", server.device)
    _, err = luce(capsys, *run)
    line = next(line for line in err.splitlines() if line.startswith(f"link to {server.device}: "))
    assert line.endswith(" us a transfer, measured; 1 chunk of a prompt at a time")
    assert "link to" not in luce(capsys, *run, "-q")[1]


def test_a_link_that_cannot_be_measured_is_assumed(server: RpcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = f"rpc:127.0.0.1:{free_port()}"
    found = look_at_link("cpu", nobody)
    assert found.unmeasured == f"{nobody} is not there" and found.bytes_s == pytest.approx(
        4 * PCIE4_LANE_BYTES_S * 0.85
    )

    def fail(*_: object) -> None:
        raise NativeError("no memory")

    monkeypatch.setattr(link, "measure_link", fail)
    assert look_at_link("cpu", server.device).unmeasured == "no memory"
    with pytest.raises(ValueError, match="expected cpu, "):
        look_at_link("cpu", "elsewhere")
