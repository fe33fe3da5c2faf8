"""What every test relies on."""

from __future__ import annotations

import os
import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # started in the background of a shell: children inherit that, and the tests that press Ctrl-C would wait in vain
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes; runs with LUCE_TEST_SLOW=1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("LUCE_TEST_SLOW") == "1":
        return
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.skip(reason="takes minutes; LUCE_TEST_SLOW=1 runs it"))
