"""Any GGUF as float32: what an independent float32 reference and the engine can both compute without rounding apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

WRITTEN_BY_THE_WRITER = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")


def dequantise_gguf(source: Path, target: Path) -> None:
    """Write `source` (one file) to `target` with every tensor as F32 and the same metadata."""
    reader = GGUFReader(str(source))
    writer = GGUFWriter(str(target), str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name in WRITTEN_BY_THE_WRITER:
            continue
        value, kinds = field.contents(), field.types
        if kinds[0] == GGUFValueType.ARRAY:
            writer.add_key_value(name, value, GGUFValueType.ARRAY, sub_type=kinds[-1])
        else:
            writer.add_key_value(name, value, kinds[0])
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        writer.add_tensor(tensor.name, values.reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
