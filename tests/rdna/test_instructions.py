"""Single instructions with values worked by hand, on both instruction sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.rdna.bench import Bench, isa
from tests.rdna.decode import decode
from tests.rdna.errors import OutOfBounds, RdnaError, UnknownInstruction

ARCHS = pytest.mark.parametrize("arch", ["rdna3", "rdna4"])
LANE = np.arange(32)


def registers() -> tuple[Any, Any]:
    from tinygrad.renderer.amd.dsl import s, v

    return s, v


@ARCHS
def test_byte_dot_product(arch: str) -> None:
    """Bytes -1, 2, -3, 4 times 5, 6, 7, -8 plus 1000, both signed; unsigned the first is 255, 2, 253, 4."""
    _, v = registers()
    b = Bench(arch)
    b.set(1, 0x04FD02FF)
    b.set(2, 0xF8070605)
    b.set(3, 1000)
    i = isa(arch)
    b.run(i.v_dot4_i32_iu8(v[4], v[1], v[2], v[3], neg=3), i.v_dot4_i32_iu8(v[5], v[1], v[2], v[3], neg=2))
    b.run(i.v_dot4_i32_iu8(v[6], v[1], v[2], v[3], neg=0))
    assert b.get(4, np.int32)[0] == -5 + 12 - 21 - 32 + 1000
    assert b.get(5, np.int32)[0] == 255 * 5 + 12 + 253 * 7 - 32 + 1000
    assert b.get(6, np.int32)[0] == 255 * 5 + 12 + 253 * 7 + 4 * 248 + 1000


@ARCHS
def test_permute_bytes(arch: str) -> None:
    """Selectors 0 to 3 are the second source's bytes, 4 to 7 the first's; 8 and 11 signs; 12 zero, 13 ones."""
    _, v = registers()
    b = Bench(arch)
    b.set(1, 0x87654321)
    b.set(2, 0xFEDC7A98)
    for select, expected in ((0x00040703, 0x982187FE), (0x0C0D080B, 0x00FF00FF)):
        b.set(3, select)
        b.run(isa(arch).v_perm_b32(v[4], v[1], v[2], v[3]))
        assert hex(b.get(4)[0]) == hex(expected)


@ARCHS
def test_bit_fields_and_shifts(arch: str) -> None:
    _, v = registers()
    b, i = Bench(arch), isa(arch)
    b.set(1, 0x12345678)
    b.run(i.v_bfe_u32(v[2], v[1], 8, 8), i.v_bfe_i32(v[3], v[1], 3, 4), i.v_alignbit_b32(v[4], v[1], v[1], 8))
    b.run(i.v_lshl_or_b32(v[5], v[1], 4, 15), i.v_ashrrev_i32_e32(v[6], 4, v[4]), i.v_bfe_u32(v[7], v[1], 8, 0))
    assert [hex(b.get(r)[0]) for r in range(2, 8)] == [
        "0x56",
        "0xffffffff",
        "0x78123456",
        "0x2345678f",
        "0x7812345",
        "0x0",
    ]


@ARCHS
def test_wide_multiply_add_and_carry(arch: str) -> None:
    s, v = registers()
    b, i = Bench(arch), isa(arch)
    b.set(1, 0xFFFFFFFF)
    b.set(2, 0xFFFFFFFF)
    b.set(4, 5)
    b.set(5, 0xFFFFFFFE)
    unsigned, signed = (
        (i.v_mad_u64_u32, i.v_mad_i64_i32) if arch == "rdna3" else (i.v_mad_co_u64_u32, i.v_mad_co_i64_i32)
    )
    b.run(unsigned(v[6:7], s[4], v[1], v[2], v[4:5]), signed(v[8:9], s[5], v[1], v[2], v[4:5]))
    total = 0xFFFFFFFF * 0xFFFFFFFF + 0xFFFFFFFE_00000005
    assert (int(b.get(7)[0]) << 32 | int(b.get(6)[0])) == total & (1 << 64) - 1
    assert b.scalars[4, 0] == (0xFFFFFFFF if total >> 64 else 0)
    assert (int(b.get(9)[0]) << 32 | int(b.get(8)[0])) == 0xFFFFFFFE_00000006
    b.set(1, LANE)
    b.set(2, 2**32 - 16)
    b.run(i.v_add_co_u32(v[3], s[6], v[1], v[2]))
    assert b.scalars[6, 0] == 0xFFFF0000
    b.run(i.v_cndmask_b32_e64(v[7], 0, 1, s[6]))
    assert b.get(7).tolist() == [0] * 16 + [1] * 16


@ARCHS
def test_packed_halves(arch: str) -> None:
    """Halves of a register, swapped and negated by the operand's bits."""
    _, v = registers()
    b, i = Bench(arch), isa(arch)
    b.set(1, int(np.array([1.5, -2.0], np.float16).view(np.uint32)[0]))
    b.set(2, int(np.array([4.0, 0.25], np.float16).view(np.uint32)[0]))
    b.run(i.v_pk_mul_f16(v[3], v[1], v[2]), i.v_pk_mul_f16(v[4], v[1], v[2], opsel=2, opsel_hi=1, neg=1))
    assert b.get(3)[:1].view(np.float16).tolist() == [6.0, -0.5]
    assert b.get(4)[:1].view(np.float16).tolist() == [-1.5 * 0.25, -2.0 * 4.0]
    b.run(i.v_fma_mix_f32(v[5], v[1], v[2], 1.0, opsel=1, opsel_hi=3, opsel_hi2=0))
    assert b.get(5, np.float32)[0] == -2.0 * 4.0 + 1.0


@ARCHS
def test_dot_products_of_halves(arch: str) -> None:
    _, v = registers()
    b, i = Bench(arch), isa(arch)
    pair = np.array([1.5, -2.0], np.float32)
    b.set(1, int(pair.astype(np.float16).view(np.uint32)[0]))
    b.set(2, int((pair.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)[0]))
    b.set(3, 0.25)
    b.run(i.v_dot2_f32_f16(v[4], v[1], v[1], v[3]), i.v_dot2_f32_bf16(v[5], v[2], v[2], v[3]))
    assert b.get(4, np.float32)[0] == b.get(5, np.float32)[0] == 2.25 + 4.0 + 0.25
    b.set(6, np.float32(1 + 2**-11 + 2**-12))
    b.set(7, np.float32(-70000.0))
    b.run(i.v_cvt_pk_rtz_f16_f32_e32(v[8], v[6], v[7]), i.v_cvt_f16_f32_e32(v[9], v[6]))
    assert b.get(8)[:1].view(np.float16).tolist() == [1.0, -65504.0]
    assert b.get(9)[:1].view(np.float16).tolist() == [1 + 2**-10, 0.0]


@ARCHS
def test_execution_mask(arch: str) -> None:
    """Inactive lanes keep their values, and give 0 in a comparison."""
    s, v = registers()
    b, i = Bench(arch), isa(arch)
    b.scalars[126] = 0x0000FF0F
    b.set(1, LANE)
    b.set(2, 100)
    b.run(i.v_add_nc_u32_e32(v[2], 7, v[1]), i.v_cmp_gt_u32_e64(s[3], v[1], 2))
    active = (0xFF0F >> LANE & 1).astype(bool)
    assert np.array_equal(b.get(2), np.where(active, LANE + 7, 100))
    assert b.scalars[3, 0] == 0xFF08
    b.run(i.v_readfirstlane_b32_e32(s[4], v[1]), i.v_writelane_b32(v[2], 55, 6), i.v_readlane_b32(s[5], v[2], 6))
    assert (b.scalars[4, 0], b.get(2)[6], b.scalars[5, 0]) == (0, 55, 55)


@ARCHS
def test_data_parallel_primitives(arch: str) -> None:
    _, v = registers()
    b, i = Bench(arch), isa(arch)
    b.set(1, LANE)
    row, at = LANE & ~15, LANE & 15
    cases = {0x1B: LANE ^ 3, 0x103: np.where(at < 13, LANE + 3, 0), 0x113: np.where(at >= 3, LANE - 3, 0)}
    cases |= {0x124: row | (at - 4 & 15), 0x140: row | 15 - at, 0x141: LANE ^ 7, 0x155: row | 5, 0x166: LANE ^ 6}
    for control, expected in cases.items():
        b.run(i.VOP1_DPP16(i.VOP1Op.V_MOV_B32_E32, v[2], i.DPP, v[1], control, fi=0, bc=1, row_mask=15, bank_mask=15))
        assert np.array_equal(b.get(2), expected), hex(control)
    b.set(2, 99)  # without bound_ctrl a lane without source is not written; nor are rows that the mask leaves out
    b.run(i.VOP1_DPP16(i.VOP1Op.V_MOV_B32_E32, v[2], i.DPP, v[1], 0x111, fi=0, bc=0, row_mask=1, bank_mask=15))
    assert np.array_equal(b.get(2), np.where((LANE > 0) & (LANE < 16), LANE - 1, 99))


@ARCHS
def test_lane_permutations(arch: str) -> None:
    s, v = registers()
    b, i = Bench(arch), isa(arch)
    b.set(1, LANE * 3)
    b.set(2, (31 - LANE) * 4)
    b.run(i.ds_bpermute_b32(v[3], v[2], v[1]), i.ds_permute_b32(v[4], v[2], v[1]))
    assert np.array_equal(b.get(3), (31 - LANE) * 3) and np.array_equal(b.get(4), (31 - LANE) * 3)
    b.scalars[8], b.scalars[9] = 0x76543210, 0xFEDCBA98
    b.run(i.v_permlanex16_b32(v[5], v[1], s[8], s[9]), i.v_permlane16_b32(v[6], v[1], s[9], s[8]))
    assert np.array_equal(b.get(5), (LANE ^ 16) * 3) and np.array_equal(b.get(6), (LANE ^ 8) * 3)


@ARCHS
def test_dual_instruction_reads_before_it_writes(arch: str) -> None:
    _, v = registers()
    b, i = Bench(arch), isa(arch)
    b.set(2, 7)
    b.set(3, 8)
    o = i.VOPDOp
    b.run(
        i.VOPD(
            o.V_DUAL_MOV_B32, o.V_DUAL_MOV_B32, vdstx=v[2], vdsty=v[3], srcx0=v[3], srcy0=v[2], vsrcx1=v[0], vsrcy1=v[0]
        )
    )
    assert (b.get(2)[0], b.get(3)[0]) == (8, 7)


@ARCHS
def test_scalar_instructions(arch: str) -> None:
    s, _ = registers()
    b, i = Bench(arch, waves=2), isa(arch)
    b.scalars[1] = 0x80000000, 5
    add = i.s_add_u32 if arch == "rdna3" else i.s_add_co_u32
    b.run(add(s[2], s[1], s[1]))
    assert b.scalars[2].tolist() == [0, 10] and b.scc.tolist() == [True, False]
    b.run(
        i.s_cselect_b32(s[3], 1, 2), i.s_ashr_i32(s[4], s[1], 4), i.s_bcnt1_i32_b32(s[5], s[1]), i.s_abs_i32(s[6], -3)
    )
    assert (
        b.scalars[3].tolist() == [1, 2] and b.scalars[4].tolist() == [0xF8000000, 0] and b.scalars[5].tolist() == [1, 2]
    )
    b.run(i.s_and_saveexec_b32(s[7], 15), i.s_movk_i32(s[8], 0xFFFE), i.s_ctz_i32_b32(s[9], s[1]))
    assert b.scalars[7].tolist() == [0xFFFFFFFF] * 2 and b.scalars[126].tolist() == [15] * 2
    b.scalars[10] = 10, 20
    b.run(i.s_mulk_i32(s[10], 0xFFFD), (i.s_addk_i32 if arch == "rdna3" else i.s_addk_co_i32)(s[10], 1))
    assert b.scalars[10].view(np.int32).tolist() == [-29, -59]
    assert b.scalars[8].tolist() == [0xFFFFFFFE] * 2 and b.scalars[9].tolist() == [31, 0]


@ARCHS
@pytest.mark.parametrize("kind", ["f16", "bf16", "iu8"])
def test_matrix_layouts(arch: str, kind: str) -> None:
    """C = A B + C with fragments filled by the manual's layout, element by element."""
    _, v = registers()
    b, i = Bench(arch), isa(arch)
    rng = np.random.default_rng(1)
    a, x, c = (rng.integers(-8, 8, (16, 16)) for _ in range(3))
    b.vectors[:] = 0

    def fill(first: int, m: np.ndarray) -> None:  # m[row or column, k]
        for lane in range(32):
            ks = range(16) if arch == "rdna3" else range(8 * (lane // 16), 8 * (lane // 16) + 8)
            values = np.array([m[lane % 16, k] for k in ks])
            if kind == "iu8":
                words = values.astype(np.int8).view(np.uint32)
            elif kind == "f16":
                words = values.astype(np.float16).view(np.uint32)
            else:
                words = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)
            b.vectors[first : first + len(words), 0, lane] = words

    fill(0, a)
    fill(8, x.T)
    number: Any = np.int32 if kind == "iu8" else np.float32
    for lane in range(32):
        for e in range(8):
            row = 2 * e + lane // 16 if arch == "rdna3" else 8 * (lane // 16) + e
            b.vectors[16 + e, 0, lane] = np.array(c[row, lane % 16], number).view(np.uint32)
    per = {"f16": 8, "bf16": 8, "iu8": 4}[kind] // (1 if arch == "rdna3" else 2)
    name = {"f16": "v_wmma_f32_16x16x16_f16", "bf16": "v_wmma_f32_16x16x16_bf16", "iu8": "v_wmma_i32_16x16x16_iu8"}[
        kind
    ]
    b.run(getattr(i, name)(v[24:31], v[0 : per - 1], v[8 : 8 + per - 1], v[16:23], neg=3 if kind == "iu8" else 0))
    product = a @ x + c
    for lane in range(32):
        for e in range(8):
            row = 2 * e + lane // 16 if arch == "rdna3" else 8 * (lane // 16) + e
            assert b.vectors[24 + e, 0, lane].view(number) == product[row, lane % 16]


@ARCHS
def test_integer_matrix_limits(arch: str) -> None:
    """16 times 127 squared on top of a C close to the greatest number: modulo 2 ** 32, or the greatest number."""
    _, v = registers()
    b, i = Bench(arch), isa(arch)
    b.vectors[0:16] = 0x7F7F7F7F
    b.vectors[16:24] = 2**31 - 100
    last = 3 if arch == "rdna3" else 1
    for clamp, expected in ((0, 16 * 127**2 - 100 - 2**31), (1, 2**31 - 1)):
        b.run(i.v_wmma_i32_16x16x16_iu8(v[24:31], v[0:last], v[8 : 8 + last], v[16:23], neg=3, clmp=clamp))
        assert (b.vectors[24:32, 0].view(np.int32) == expected).all()


@ARCHS
def test_lds(arch: str) -> None:
    _, v = registers()
    b, i = Bench(arch), isa(arch)
    b.set(1, LANE * 8)
    b.set(2, LANE + 1000)
    b.set(3, LANE + 2000)
    b.run(i.ds_store_2addr_b32(v[0], v[1], v[2], v[3], offset0=4, offset1=5), i.ds_load_b64(v[4:5], v[1], offset0=16))
    assert np.array_equal(b.get(4), LANE + 1000) and np.array_equal(b.get(5), LANE + 2000)
    b.run(i.ds_load_u16(v[6], v[1], offset0=18), i.ds_load_i8(v[7], v[1], offset0=16))
    assert not b.get(6).any() and b.get(7, np.int32)[0] == -24  # 1000 is 0x3e8
    b.set(1, 1020)
    with pytest.raises(OutOfBounds, match="ds_load_b64.* outside the workgroup's LDS, which has 1024 bytes"):
        b.run(i.ds_load_b64(v[4:5], v[1]))


@ARCHS
def test_narrow_and_unaligned_loads(arch: str) -> None:
    s, v = registers()
    b, i = Bench(arch), isa(arch)
    data = np.arange(1, 251, dtype=np.uint8)
    at = b.memory.alloc(data, "bytes")
    b.scalars[2], b.scalars[3] = at & 0xFFFFFFFF, at >> 32
    b.set(1, LANE * 2)
    where = {"saddr": s[2:3], **({"addr": v[1]} if arch == "rdna3" else {"vaddr": v[1:2]})}
    offset = "offset" if arch == "rdna3" else "ioffset"
    b.run(i.global_load_b32(v[2], **where, **{offset: 1}), i.global_load_u16(v[3], **where))
    b.set(4, 0xAAAAAAAA)
    b.run(i.global_load_d16_hi_b16(v[4], **where), i.global_load_i8(v[5], **where, **{offset: 140}))
    for lane in (0, 31):
        assert b.get(2)[lane] == int.from_bytes(data[2 * lane + 1 : 2 * lane + 5].tobytes(), "little")
        assert b.get(3)[lane] == int.from_bytes(data[2 * lane : 2 * lane + 2].tobytes(), "little")
        assert b.get(4)[lane] == int(b.get(3)[lane]) << 16 | 0xAAAA
        assert b.get(5, np.int32)[lane] == np.int8(data[140 + 2 * lane].view(np.int8))
    with pytest.raises(OutOfBounds, match="nearest is bytes .*ends 2 bytes behind its end"):
        b.run(i.global_load_b32(v[2], **where, **{offset: 250 - 64}))


def test_unknown_instructions_stop() -> None:
    """No encoding, an opcode without a meaning here, and a form that is not handled: each by its name."""
    with pytest.raises(UnknownInstruction, match="no rdna3 encoding"):
        decode(b"\xff" * 16, 0, "rdna3")
    _, v = registers()
    i = isa("rdna3")
    with pytest.raises(UnknownInstruction, match="v_mqsad_u32_u8"):
        Bench("rdna3").run(i.v_mqsad_u32_u8(v[0:3], v[4:5], v[6], v[8:11]))
    with pytest.raises(UnknownInstruction, match="v_add_nc_u32.*clamp"):
        Bench("rdna3").run(i.v_add_nc_u32_e64(v[0], v[1], v[2], clmp=1))


def test_matrix_instruction_wants_all_lanes() -> None:
    _, v = registers()
    b = Bench("rdna4")
    b.scalars[126] = 1
    with pytest.raises(RdnaError, match="switched off"):
        b.run(isa("rdna4").v_wmma_f32_16x16x16_f16(v[24:31], v[0:3], v[8:11], v[16:23]))
