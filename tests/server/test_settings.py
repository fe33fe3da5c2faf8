"""Settings are checked before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from pyluce.server import ServerSettings, SettingError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("api_key", ""),
        ("api_key", "schlüssel"),
        ("api_key", "a\nb"),
        ("max_body_bytes", 0),
        ("default_max_tokens", 0),
        ("keep_alive_s", 0.0),
        ("heartbeat_limit_s", -1.0),
        ("status_interval_s", float("nan")),
        ("shutdown_grace_s", -1.0),
        ("deadline_s", 0.0),
    ],
)
def test_bad_settings_name_themselves(name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=f"^{name}: expected"):
        ServerSettings(**{name: value})


def test_efforts() -> None:
    efforts = ServerSettings().efforts
    limits = [efforts.limit(effort) for effort in ("low", "medium", "high", "x-high")]
    assert limits == sorted(limit for limit in limits if limit is not None)
    assert efforts.limit("max") is None
