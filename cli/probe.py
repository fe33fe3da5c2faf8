"""`python -m cli.probe BACKEND`: load one backend's libraries and print what they see, as JSON. BACKEND may be `rpc:HOST:PORT`.

`luce doctor` runs it as a process of its own, because a broken driver ends the process that touches it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any


def probe(backend: str) -> dict[str, Any]:
    """The stamp, the folder, the devices and the CPU features of one backend's libraries. Raises NativeError."""
    from pyluce.native import load_libraries
    from pyluce.native.devices import cpu_features, describe_remote, list_devices

    if backend.startswith("rpc:"):
        remote = describe_remote(backend)
        return {"devices": [{**asdict(remote), "kind": "rpc"}]}
    libraries = load_libraries(backend)
    return {
        "directory": str(libraries.directory),
        "stamp": libraries.stamp,
        "devices": [{**asdict(device), "kind": device.kind.name.lower()} for device in list_devices()],
        "cpu_features": cpu_features(),
    }


def main(backend: str) -> int:
    """Print the probe's result, or {"error": message}."""
    from pyluce.native import NativeError

    try:
        result = probe(backend)
    except (NativeError, OSError) as error:
        result = {"error": str(error)}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
