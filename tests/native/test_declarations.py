"""Every declaration against the header that it was read from, and against what the library itself does."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from pyluce.native import declare, gguf, llama_structs, load_libraries, luce, rpc, structs
from pyluce.native import ggml as ggml
from pyluce.native import ggml_backend as api
from pyluce.native import llama as llama
from tests.native.headers import POINTER, TEXT, Headers

SOURCE = Path(__file__).resolve().parents[2] / "vendor" / "src"
HEADERS = [
    *(
        SOURCE / "ggml" / "include" / f"{name}.h"
        for name in ("ggml", "ggml-alloc", "ggml-backend", "ggml-cpu", "ggml-rpc", "gguf")
    ),
    SOURCE / "ggml" / "include" / "ggml-luce.h",
    SOURCE / "ggml" / "include" / "ggml-luce-path.h",
    SOURCE / "ggml" / "include" / "ggml-luce-guard.h",
    SOURCE / "include" / "llama.h",
]
STRUCTS = [
    value
    for module in (structs, llama_structs, gguf, rpc)
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, ctypes.Structure) and value is not ctypes.Structure
]
ENUMS = [
    (structs.GGMLStatus, "ggml_status", "GGML_STATUS_", set()),
    (structs.GGMLType, "ggml_type", "GGML_TYPE_", {"COUNT"}),
    (structs.GGMLPrec, "ggml_prec", "GGML_PREC_", {"DEFAULT"}),
    (structs.GGMLSortOrder, "ggml_sort_order", "GGML_SORT_ORDER_", set()),
    (structs.GGMLLogLevel, "ggml_log_level", "GGML_LOG_LEVEL_", set()),
    (structs.GGMLTensorFlag, "ggml_tensor_flag", "GGML_TENSOR_FLAG_", set()),
    (structs.BackendBufferUsage, "ggml_backend_buffer_usage", "GGML_BACKEND_BUFFER_USAGE_", set()),
    (structs.BackendDevType, "ggml_backend_dev_type", "GGML_BACKEND_DEVICE_TYPE_", set()),
    (gguf.GGUFType, "gguf_type", "GGUF_TYPE_", {"COUNT"}),
    (llama_structs.VocabType, "llama_vocab_type", "LLAMA_VOCAB_TYPE_", set()),
    (llama_structs.TokenAttr, "llama_token_attr", "LLAMA_TOKEN_ATTR_", set()),
    (llama_structs.FlashAttnType, "llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_", set()),
    (llama_structs.LoadMode, "llama_load_mode", "LLAMA_LOAD_MODE_", set()),
    (llama_structs.LazyMode, "llama_lazy_mode", "LLAMA_LAZY_MODE_", set()),
    (luce.Phase, "ggml_luce_phase", "GGML_LUCE_PHASE_", set()),
    (luce.Fault, "ggml_luce_fault", "GGML_LUCE_FAULT_", set()),
]


@pytest.fixture(scope="module")
def headers() -> Headers:
    missing = [path for path in HEADERS if not path.is_file()]
    if missing:
        pytest.skip(f"the unpacked source is not there ({missing[0]})")
    return Headers(HEADERS)


def fits(kind: object, ctype: object) -> bool:
    """Whether a declared ctypes type may stand for the kind of a C type."""
    if kind in (POINTER, TEXT):
        is_pointer = ctype in (ctypes.c_void_p, ctypes.c_char_p) or (
            isinstance(ctype, type) and issubclass(ctype, ctypes._Pointer)
        )
        return is_pointer and (kind == TEXT or ctype is not ctypes.c_char_p)
    if isinstance(kind, str):
        return isinstance(ctype, type) and issubclass(ctype, ctypes.Structure) and ctype.__name__ == kind
    return kind is ctype


@pytest.mark.parametrize("name", sorted(declare.declarations))
def test_function_matches_header(headers: Headers, name: str) -> None:
    entry = declare.declarations[name]
    prototype = headers.prototype(name)
    assert prototype is not None, f"{name} is in no header"
    result, arguments = prototype
    if result == TEXT:
        assert entry.result is ctypes.c_char_p
    else:
        assert fits(result, entry.result), f"result: header {result}, declared {entry.result}"
    assert len(arguments) == len(entry.arguments), f"header {arguments}, declared {entry.arguments}"
    for index, (kind, ctype) in enumerate(zip(arguments, entry.arguments, strict=True)):
        assert fits(kind, ctype), f"argument {index}: header {kind}, declared {ctype}"


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda s: s.__name__)
def test_struct_matches_header(headers: Headers, struct: type[ctypes.Structure]) -> None:
    expected = headers.fields(struct.__name__)
    assert [name for name, _, _ in expected] == [field[0] for field in struct._fields_]
    for (name, kind, length), field in zip(expected, struct._fields_, strict=True):
        ctype = field[1]
        if length:
            assert issubclass(ctype, ctypes.Array) and ctype._length_ == length, name
            ctype = ctype._type_
        assert fits(kind, ctype), f"{name}: header {kind}, declared {ctype}"


@pytest.mark.parametrize(("enum", "name", "prefix", "left_out"), ENUMS, ids=lambda v: v if isinstance(v, str) else None)
def test_enum_matches_header(headers: Headers, enum: type, name: str, prefix: str, left_out: set[str]) -> None:
    expected = {key.removeprefix(prefix): value for key, value in headers.enums[name].items()}
    declared = {key: member.value for key, member in enum.__members__.items()}
    assert declared == {key: value for key, value in expected.items() if key not in left_out}


def test_constants_match_headers(headers: Headers) -> None:
    names = [name for name in vars(structs) if name.startswith("GGML_") and name != "GGML_MEM_ALIGN"]
    assert names
    for name in names:
        assert getattr(structs, name) == headers.constants[name]
    assert luce.PAGE_TOKENS == headers.constants.get("GGML_LUCE_PAGE_TOKENS", luce.PAGE_TOKENS)


def test_comparison_notices_a_wrong_declaration(headers: Headers) -> None:
    result, arguments = headers.prototype("ggml_scale") or (None, [])
    assert not fits(arguments[2], ctypes.c_double)
    assert not fits(result, ctypes.c_int)
    assert fits(headers.fields("llama_context_params")[0][1], ctypes.c_uint32)
    assert not fits(headers.fields("llama_context_params")[0][1], ctypes.c_int32)


def test_tensor_header_is_as_large_as_the_library_says() -> None:
    load_libraries()
    ctx = ggml.ggml_init(structs.ggml_init_params(1 << 16, None, True))
    assert ctx
    before = ggml.ggml_used_mem(ctx)
    ggml.ggml_new_tensor_1d(ctx, structs.GGMLType.F32, 1)
    object_header = ggml.ggml_tensor_overhead() - ctypes.sizeof(structs.ggml_tensor)
    assert ggml.ggml_used_mem(ctx) - before in (ctypes.sizeof(structs.ggml_tensor), ggml.ggml_tensor_overhead())
    assert 0 < object_header <= 64
    ggml.ggml_free(ctx)


def test_tensor_fields_hold_what_was_asked_for() -> None:
    load_libraries()
    ctx = ggml.ggml_init(structs.ggml_init_params(1 << 16, None, False))
    assert ctx
    tensor = ggml.ggml_new_tensor_4d(ctx, structs.GGMLType.Q8_0, 64, 3, 5, 7)
    ggml.ggml_set_name(tensor, b"probe")
    ggml.ggml_set_output(tensor)
    view = ggml.ggml_view_1d(ctx, tensor, 32, 34)
    header = structs.ggml_tensor.from_address(tensor)
    assert (header.type, list(header.ne), header.name) == (8, [64, 3, 5, 7], b"probe")
    assert list(header.nb) == [34, 68, 204, 1020]
    assert header.flags == structs.GGMLTensorFlag.OUTPUT
    assert header.data == ggml.ggml_get_data(tensor)
    viewed = structs.ggml_tensor.from_address(view)
    assert (viewed.view_src, viewed.view_offs, viewed.src[0]) == (tensor, 34, tensor)
    assert ggml.ggml_op_name(viewed.op) == b"VIEW"
    ggml.ggml_free(ctx)


def test_type_traits_of_a_known_type() -> None:
    load_libraries()
    traits = structs.ggml_type_traits.from_address(ggml.ggml_get_type_traits(structs.GGMLType.Q4_K))
    assert (traits.type_name, traits.blck_size, traits.type_size, traits.is_quantized) == (b"q4_K", 256, 144, True)
    assert traits.to_float and traits.from_float_ref


def test_default_parameters_have_their_documented_values() -> None:
    load_libraries()
    context = llama.llama_context_default_params()
    assert (context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max) == (512, 2048, 512, 1)
    assert (context.yarn_ext_factor, context.yarn_beta_fast, context.yarn_beta_slow) == (-1.0, -1.0, -1.0)
    assert (context.type_k, context.type_v) == (structs.GGMLType.F16, structs.GGMLType.F16)
    assert (context.embeddings, context.offload_kqv, context.no_perf, context.op_offload) == (False, True, True, True)
    assert (context.samplers, context.n_samplers, context.ctx_other) == (None, 0, None)
    model = llama.llama_model_default_params()
    assert model.tensor_split is None and model.progress_callback is None and model.kv_overrides is None
    assert (model.vocab_only, model.check_tensors, model.use_extra_bufts) == (False, False, True)
    assert llama.llama_sampler_chain_default_params().no_perf is True


def test_device_properties_are_plausible() -> None:
    load_libraries()
    device = api.ggml_backend_dev_by_type(structs.BackendDevType.CPU)
    assert device
    props = structs.ggml_backend_dev_props()
    api.ggml_backend_dev_get_props(device, ctypes.byref(props))
    assert props.name == b"CPU" and props.type == structs.BackendDevType.CPU
    assert 0 < props.memory_free <= props.memory_total < 2**50
    assert props.caps.buffer_from_host_ptr and not getattr(props.caps, "async")
