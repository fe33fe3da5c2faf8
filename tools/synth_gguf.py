#!/usr/bin/env python3
"""Write a qwen4exp GGUF with random weights, for benchmarks and exactness tests.

What such a model writes is noise; names, shapes, types and metadata are those of the real model, so speed and memory
are the real model's, layer for layer. Deterministic: the same arguments give the same file.

    python tools/synth_gguf.py build/models/tiny.gguf --type Q4_K --mtp
    python tools/synth_gguf.py build/models/full-12.gguf --preset full --layers 12
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.synth import PRESETS, Shape, write_model


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--layers", type=int, help="layers of the trunk, a multiple of 4")
    parser.add_argument("--mtp", action="store_true", help="with an MTP block")
    parser.add_argument("--top-k", type=int, help="selection budget of the indexer, in tokens")
    parser.add_argument("--type", help="type of every matrix, for example Q4_K")
    parser.add_argument("--dense-type", help="type of dense matrices")
    parser.add_argument("--expert-type", help="type of the routed experts")
    parser.add_argument("--table-type", help="type of the PLE table")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--library", type=Path, help="libggml-base (default: this project's build)")
    return parser.parse_args(arguments)


def chosen_shape(options: argparse.Namespace) -> Shape:
    """The preset with what the arguments change."""
    shape: Shape = PRESETS[options.preset]
    if options.type:
        shape = shape.with_type(options.type)
    return replace(
        shape,
        mtp=options.mtp or shape.mtp,
        n_layer=options.layers or shape.n_layer,
        indexer_top_k=options.top_k or shape.indexer_top_k,
        dense=options.dense_type or shape.dense,
        expert_up=options.expert_type or shape.expert_up,
        expert_down=options.expert_type or shape.expert_down,
        table=options.table_type or shape.table,
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        paths = write_model(
            options.output, chosen_shape(options), seed=options.seed, library=options.library, shards=options.shards
        )
    except (ValueError, OSError) as error:
        print(f"synth_gguf: {error}", file=sys.stderr)
        return 1
    for path in paths:
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
