#!/usr/bin/env python3
"""Write pyluce/data/published_quants.json: header facts of the published Qwen3.8-Flash-Next quants, for `luce plan --like`.

Everything here is from design notes about the published files (their model cards and the reference system's documents), not from
the files: nobody here had them. Shapes follow from the hyper-parameters. The type of each tensor was not published, so types are
null but for the gains, which the architecture stores in F32; weights are then planned from the published totals.

    python tools/published_facts.py            # write the file
    python tools/published_facts.py --check    # exit with 1 when the file is not what would be written
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pyluce.weights.hparams import HParams, PleParams
from pyluce.weights.tensors import OUTPUT, Expected, Role, block_tensors, global_tensors, mtp_tensors

TARGET = Path(__file__).resolve().parents[1] / "pyluce" / "data" / "published_quants.json"
GIB = 1 << 30

_PLE_SIZES = (
    20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077,
    20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171,
)  # fmt: skip

HPARAMS = HParams(
    n_layer=48,
    n_layer_nextn=0,
    n_embd=2560,
    n_vocab=248320,
    n_ctx_train=262144,
    n_head=24,
    n_head_kv=2,
    head_dim=256,
    rope_dim=64,
    rope_sections=(11, 11, 10, 0),
    rope_freq_base=1e7,
    rms_eps=1e-6,
    n_expert=512,
    n_expert_used=10,
    n_ff_exp=640,
    n_ff_shexp=640,
    hc_count=4,
    hc_low_rank=320,
    ssm_conv_kernel=4,
    ssm_state=128,
    ssm_k_heads=16,
    ssm_v_heads=48,
    ssm_inner=6144,
    indexer_heads=4,
    indexer_dim=128,
    indexer_top_k=2048,
    compress_ratio=4,
    recurrent_layers=tuple((i + 1) % 4 != 0 for i in range(48)),
    ple=PleParams(
        layer=1,
        ngram_size=3,
        heads_per_ngram=8,
        n_heads=16,
        head_dim=160,
        conv_kernel=4,
        eos_token_id=248044,
        image_token_id=248056,
        multipliers=(23703573157769, 20109073645365, 8052911324071),
        head_offsets=tuple(sum(_PLE_SIZES[:i]) for i in range(16)),
        head_vocab_sizes=_PLE_SIZES,
    ),
    name="Qwen3.8 Flash Next",
    file_type=None,
)

_NO_TYPES = "the type of each tensor is not published; weights are planned from the published total"

QUANTS: dict[str, dict[str, Any]] = {
    "ud-q4_k_xl": {
        "title": "Qwen3.8-Flash-Next UD-Q4_K_XL (unsloth)",
        "loaded_bytes": 77 * GIB,
        "expert_bytes": round(71.7 * GIB),
        "sidecar_bytes": 2786568256,
        "notes": [
            _NO_TYPES,
            "published: about 111 GB in 4 shards with the n-gram table, 77 GB of GTT, routed experts 71.7 GiB; dense mostly Q8_0,"
            " experts a mix of Q4_K, Q5_K and Q6_K",
            "77 GB is read as GiB: 71.7 GiB of experts alone are 77 * 10^9 bytes",
            "the MTP sidecar is mtp-Qwen3.8-Flash-Next-shared-Q8_0.gguf",
        ],
    },
    "iq4_nl": {
        "title": "Qwen3.8-Flash-Next IQ4_NL (bartowski)",
        "loaded_bytes": round(66.24 * GIB),
        "expert_bytes": None,
        "sidecar_bytes": None,
        "notes": [
            _NO_TYPES,
            "published: 3 shards, 1222 tensors, 66.24 GiB loaded, 73 GB of GTT with state and graphs; the shapes here are 1224 tensors",
        ],
    },
    "gsq-rco": {
        "title": "Qwen3.8-Flash-Next GSQ-RCO IQ3_XXS (ISTA-DASLab)",
        "loaded_bytes": 47 * GIB,
        "expert_bytes": None,
        "sidecar_bytes": None,
        "notes": [
            _NO_TYPES,
            "published: 47 GB in 2 shards, IQ3_S in 9 expert tensors, Q2_0 in 202 tensors",
            "not said whether 47 GB are on disk or loaded, GB or GiB; the larger reading, 47 GiB loaded, is planned",
        ],
    },
}


def tensor_rows(h: HParams) -> list[tuple[str, str, list[int], str | None]]:
    """(name pattern, layers, ne, type) of every tensor of the trunk, and of the draft head, without the indexer that it does not use."""
    assert h.ple is not None
    ple_prefix = f"blk.{h.ple.layer}."
    rows = [
        _row(t, ple_prefix, "ple" if t.name.startswith(ple_prefix) else "none")
        for t in [*global_tensors(h), Expected(OUTPUT, (h.n_embd, h.n_vocab), Role.MATRIX)]
    ]
    linear = [_row(t, "blk.0.", "linear") for t in block_tensors(h, 0)]
    full = [_row(t, "blk.3.", "full") for t in block_tensors(h, 3)]
    names = {row[0] for row in linear} & {row[0] for row in full}
    rows += [(name, "all", ne, kind) for name, _, ne, kind in linear if name in names]
    rows += _others(linear, names)
    rows += _others(full, names)
    head = f"blk.{h.n_layer}."
    rows += [_row(t, head, "mtp") for t in mtp_tensors(h) if ".indexer." not in t.name]
    return rows


def _others(
    rows: Iterable[tuple[str, str, list[int], str | None]], names: set[str]
) -> list[tuple[str, str, list[int], str | None]]:
    return [row for row in rows if row[0] not in names]


def _row(t: Expected, prefix: str, layers: str) -> tuple[str, str, list[int], str | None]:
    pattern = t.name.replace(prefix, "blk.{}.", 1) if t.name.startswith(prefix) else t.name
    return pattern, layers, list(t.ne), "F32" if t.role is Role.VECTOR else None


def document() -> str:
    """The file's text: one line a tensor and a quant."""
    h = asdict(HPARAMS)
    tensors = ",\n".join("   " + json.dumps(row) for row in tensor_rows(HPARAMS))
    quants = ",\n".join(f"  {json.dumps(name)}: {json.dumps(quant)}" for name, quant in QUANTS.items())
    made_by = "tools/published_facts.py; facts about published files, types null where they were not published"
    return (
        f'{{\n "made_by": {json.dumps(made_by)},\n "model": {{\n  "hparams": {json.dumps(h)},\n'
        f'  "tensors": [\n{tensors}\n  ]\n }},\n "quants": {{\n{quants}\n }}\n}}\n'
    )


def main(arguments: list[str]) -> int:
    text = document()
    if arguments == ["--check"]:
        return 0 if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text else 1
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
