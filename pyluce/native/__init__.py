"""The ctypes binding of the patched ggml, gguf and llama libraries: typed declarations and checked owners."""

from __future__ import annotations

from pyluce.native.backend import (
    Backend,
    BackendBuffer,
    GraphAllocator,
    cpu_repack_buffer_type,
    cpu_repack_buffer_types,
)
from pyluce.native.devices import DeviceInfo, cpu_features, list_devices
from pyluce.native.errors import ClosedError, ForkedError, LibraryMismatchError, NativeError, WrongThreadError
from pyluce.native.gguf_file import GgufFile, GgufTensor
from pyluce.native.inference import LlamaContext, LlamaModel
from pyluce.native.library import Libraries, load_libraries
from pyluce.native.quants import dequantize, quantize, to_float
from pyluce.native.sampler import SamplerChain
from pyluce.native.tensors import (
    Graph,
    TensorArena,
    set_name,
    tensor_get,
    tensor_set,
    tensor_shape,
    tensor_struct,
)
from pyluce.native.thread import ThreadGuard, owned_by_thread
from pyluce.native.vocabulary import Vocabulary

__all__ = [
    "Backend",
    "BackendBuffer",
    "ClosedError",
    "DeviceInfo",
    "ForkedError",
    "GgufFile",
    "GgufTensor",
    "Graph",
    "GraphAllocator",
    "Libraries",
    "LibraryMismatchError",
    "LlamaContext",
    "LlamaModel",
    "NativeError",
    "SamplerChain",
    "TensorArena",
    "ThreadGuard",
    "Vocabulary",
    "WrongThreadError",
    "cpu_features",
    "cpu_repack_buffer_type",
    "cpu_repack_buffer_types",
    "dequantize",
    "list_devices",
    "load_libraries",
    "owned_by_thread",
    "quantize",
    "set_name",
    "tensor_get",
    "tensor_set",
    "tensor_shape",
    "tensor_struct",
    "to_float",
]
