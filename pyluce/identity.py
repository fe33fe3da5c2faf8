"""What a kept state belongs to: two processes whose identities are equal compute the same bits, so either may go on with the other's states."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from typing import Final

from pyluce.graph import RunnerOptions
from pyluce.native import load_libraries
from pyluce.native.devices import cpu_features, list_devices
from pyluce.state.layout import state_layout
from pyluce.tuning import NO_TUNING, Tuning
from pyluce.weights import ModelFile

FORMAT: Final = "1"
SAMPLES: Final = 64
SAMPLE_BYTES: Final = 4096
TEMPLATE_KEY: Final = "tokenizer.chat_template"

_SCHEDULE: Final = {
    "tune", "n_slots", "n_threads", "max_rollback", "prefix_cache_bytes", "draft_path", "hot_experts", "prompt_streams",
}  # fmt: skip
"""Options of a runner that decide when something is computed and where it is kept, never what comes out (or a file that is among the model's)."""


def state_identity(
    model: ModelFile, options: RunnerOptions, template: str | None, tuning: Tuning = NO_TUNING
) -> dict[str, str]:
    """Names and values, all of which must be equal: model, options of the runner, template, layout of the state, libraries, machine, choices.

    `template`: what is used instead of the model's own. `tuning`: the choices between kernels that are in effect.
    """
    source = template if template is not None else model.metadata.get(TEMPLATE_KEY, "")
    layout = [
        (part.name, int(part.type), part.ne[0]) for part in state_layout(model.hparams, options.state(model.hparams))
    ]
    return {
        "format": FORMAT,
        "model": model_digest(model),
        "options": _text({name: value for name, value in asdict(options).items() if name not in _SCHEDULE}),
        "template": _digest(str(source)),
        "layout": _digest(_text(layout)),
        "libraries": load_libraries(options.device.partition(":")[0]).stamp,
        "machine": _digest(_text(cpu_features())),
        "gpu": _digest(_text(_gpu(options.device))),
        "tuning": tuning.digest or "none",
    }


def _gpu(device: str) -> list[str]:
    """What kind of GPU computes, nothing for the CPU."""
    if device == "cpu":
        return []
    return [
        text for info in list_devices() if info.device == device for text in (info.description, info.architecture or "")
    ]


def model_digest(model: ModelFile) -> str:
    """SHA-256 of each shard's header, size and time of change, and of some of its data: reading all of it would take minutes."""
    digest = hashlib.sha256()
    for shard in model.shards:
        status = os.fstat(shard.fd)
        digest.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
        start = shard.header.data_offset
        digest.update(os.pread(shard.fd, start, 0))
        step = max(SAMPLE_BYTES, (status.st_size - start) // SAMPLES)
        for offset in range(start, status.st_size, step):
            digest.update(os.pread(shard.fd, SAMPLE_BYTES, offset))
    return digest.hexdigest()


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
