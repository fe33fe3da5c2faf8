"""Enums and structs of ggml.h and ggml-backend.h, field for field (tests/native compares them with the headers)."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_char, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from enum import IntEnum, IntFlag
from typing import ClassVar

GGML_MAX_DIMS = 4
GGML_MAX_SRC = 10
GGML_MAX_OP_PARAMS = 64
GGML_MAX_NAME = 64
GGML_MAX_N_THREADS = 512
GGML_MEM_ALIGN = 16
GGML_ROPE_TYPE_NORMAL = 0
GGML_ROPE_TYPE_NEOX = 2
GGML_ROPE_TYPE_MROPE = 8
GGML_ROPE_TYPE_IMROPE = 40


class GGMLStatus(IntEnum):
    """enum ggml_status"""

    ALLOC_FAILED = -2
    FAILED = -1
    SUCCESS = 0
    ABORTED = 1


class GGMLType(IntEnum):
    """enum ggml_type"""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


class GGMLPrec(IntEnum):
    """enum ggml_prec (PREC_DEFAULT, an alias of 0, left out)"""

    UNDEFINED = 0
    F32 = 10
    BF16 = 15
    F16 = 20
    Q8 = 30
    Q4 = 40


class GGMLSortOrder(IntEnum):
    """enum ggml_sort_order"""

    ASC = 0
    DESC = 1


class GGMLLogLevel(IntEnum):
    """enum ggml_log_level"""

    NONE = 0
    DEBUG = 1
    INFO = 2
    WARN = 3
    ERROR = 4
    CONT = 5


class GGMLTensorFlag(IntFlag):
    """enum ggml_tensor_flag"""

    INPUT = 1
    OUTPUT = 2
    PARAM = 4
    LOSS = 8
    COMPUTE = 16


class BackendBufferUsage(IntEnum):
    """enum ggml_backend_buffer_usage"""

    ANY = 0
    WEIGHTS = 1
    COMPUTE = 2


class BackendDevType(IntEnum):
    """enum ggml_backend_dev_type"""

    CPU = 0
    GPU = 1
    IGPU = 2
    ACCEL = 3
    META = 4


class ggml_init_params(ctypes.Structure):
    _fields_: ClassVar = [
        ("mem_size", c_size_t),
        ("mem_buffer", c_void_p),
        ("no_alloc", c_bool),
    ]


class ggml_tensor(ctypes.Structure):
    """ne: elements per axis, fastest first; nb: strides in bytes; data: host address on host buffers."""

    type: int
    buffer: int | None
    op: int
    flags: int
    view_src: int | None
    view_offs: int
    data: int | None
    name: bytes
    _fields_: ClassVar = [
        ("type", c_int),
        ("buffer", c_void_p),
        ("ne", c_int64 * GGML_MAX_DIMS),
        ("nb", c_size_t * GGML_MAX_DIMS),
        ("op", c_int),
        ("op_params", c_int32 * (GGML_MAX_OP_PARAMS // 4)),
        ("flags", c_int32),
        ("src", c_void_p * GGML_MAX_SRC),
        ("view_src", c_void_p),
        ("view_offs", c_size_t),
        ("data", c_void_p),
        ("name", c_char * GGML_MAX_NAME),
        ("extra", c_void_p),
        ("padding", c_char * 8),
    ]


class ggml_type_traits(ctypes.Structure):
    """to_float(const void * x, float * y, int64_t k) and from_float_ref(const float * x, void * y, int64_t k)."""

    type_name: bytes
    blck_size: int
    blck_size_interleave: int
    type_size: int
    is_quantized: bool
    to_float: int | None
    from_float_ref: int | None
    _fields_: ClassVar = [
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", c_void_p),
        ("from_float_ref", c_void_p),
    ]


class ggml_threadpool_params(ctypes.Structure):
    """poll: 0 (sleep at once) to 100 (spin long) between graphs; cpumask all False: any core."""

    n_threads: int
    poll: int
    _fields_: ClassVar = [
        ("cpumask", c_bool * GGML_MAX_N_THREADS),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    ]


class ggml_cplan(ctypes.Structure):
    """How the CPU will compute a graph; `work_size` bytes are its work buffer."""

    work_size: int
    _fields_: ClassVar = [
        ("work_size", c_size_t),
        ("work_data", c_void_p),
        ("n_threads", c_int),
        ("threadpool", c_void_p),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("use_ref", c_bool),
    ]


class ggml_backend_dev_caps(ctypes.Structure):
    _fields_: ClassVar = [
        ("async", c_bool),
        ("host_buffer", c_bool),
        ("buffer_from_host_ptr", c_bool),
        ("events", c_bool),
        ("mmap_support", c_bool),
    ]


class ggml_backend_dev_props(ctypes.Structure):
    name: bytes | None
    description: bytes | None
    memory_free: int
    memory_total: int
    type: int
    device_id: bytes | None
    caps: ggml_backend_dev_caps
    _fields_: ClassVar = [
        ("name", c_char_p),
        ("description", c_char_p),
        ("memory_free", c_size_t),
        ("memory_total", c_size_t),
        ("type", c_int),
        ("device_id", c_char_p),
        ("caps", ggml_backend_dev_caps),
    ]


class ggml_backend_feature(ctypes.Structure):
    name: bytes | None
    value: bytes | None
    _fields_: ClassVar = [("name", c_char_p), ("value", c_char_p)]


CONVERT_ROWS = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)
"""Prototype of ggml_to_float_t and ggml_from_float_t: (source address, destination address, elements)."""

LOG_CALLBACK = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
"""Prototype of ggml_log_callback: (level, text, user data)."""

ABORT_CALLBACK = ctypes.CFUNCTYPE(c_bool, c_void_p)
"""Prototype of ggml_abort_callback: (user data) -> stop the computation?"""

FATAL_CALLBACK = ctypes.CFUNCTYPE(None, c_char_p)
"""Prototype of ggml_abort_callback_t, called with the message just before ggml aborts the process."""
