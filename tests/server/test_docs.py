"""The examples of docs/server.md, run as they stand there but for the port."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyluce.luce import Luce
from pyluce.options import LoadOptions
from tests.support.echo_service import running_server
from tests.support.real_model import require_libraries

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 15
    assert all(example.startswith("curl ") for example in EXAMPLES)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The model that the examples mean: the one that is there without a name."""
    require_libraries()
    options = LoadOptions(max_ctx=2048, threads=1)
    with Luce.load_with(None, options) as luce, running_server(luce, options) as server:
        yield server.url


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example(url: str, example: str) -> None:
    assert "http://127.0.0.1:8080/" in example
    command = example.replace("http://127.0.0.1:8080", url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout
    if '"stream": true' in example:
        assert "error" not in done.stdout
        assert done.stdout.rstrip().endswith(("data: [DONE]", '{"type":"message_stop"}'))
    elif not example.rstrip().endswith("/metrics"):
        assert "error" not in json.loads(done.stdout) or json.loads(done.stdout)["error"] is None
