"""`python -m tests.support.solo_process MODEL REQUEST.json`: a request alone in a fresh process, as hashes.

REQUEST.json: {"prompt": [ids], "n": 8, "options": {RunnerOptions by keyword}}. Prints {"tokens": [...], "hashes": [...]}.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

from tests.support.runs import open_runner, solo


def main() -> None:
    model, request = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    factory = functools.partial(open_runner, model, **request["options"])
    alone = solo(factory, request["prompt"], request["n"])
    print(json.dumps({"tokens": alone.tokens, "hashes": alone.hashes}))


if __name__ == "__main__":
    main()
