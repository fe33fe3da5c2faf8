"""The self-test as a part of the device suite: `python -m bench.device_ops --device cuda:0 --record FILE`, or `--describe`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from pyluce.native import load_libraries
from pyluce.native.devices import find_device, list_devices, parse_device
from pyluce.selftest.run import run


def main() -> int:
    """Run every test, or print what the device is; 1 when a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", required=True)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--describe", action="store_true", help="print the device as JSON and end")
    a = parser.parse_args()
    load_libraries(parse_device(a.device)[0])
    find_device(a.device)
    if a.describe:
        device = next(info for info in list_devices() if info.device == a.device)
        print(json.dumps({**asdict(device), "kind": device.kind.name.lower()}))
        return 0
    results, failed = [], 0
    for result in run(a.device):
        results.append(asdict(result) | {"error": result.error if result.error < float("inf") else None})
        if not result.ok:
            failed += 1
            print(
                f"  FAILED: {result.op}, {result.shape}: error {result.error:.1e} of {result.bound:.0e} {result.note}",
                flush=True,
            )
        if a.record:
            a.record.write_text(json.dumps(results))
    refused = [f"{r['op']} {r['shape']}" for r in results if r["ok"] and r["note"]]
    print(
        f"  {len(results)} tests, {failed} failed, {len(refused)} refused by the device: {', '.join(refused) or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
