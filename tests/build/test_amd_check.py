"""The AMD check's reading and judging, on short pieces of what the LLVM tools print: no compiler, no network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from buildtools import amd_check, rocm
from buildtools import amd_resources as resources
from buildtools.amd_resources import Kernel
from buildtools.report import BuildError, Report

TARGETS = ["gfx1151", "gfx1201"]
COMPILER = "clang version 21.1.8"
NOTES = """Displaying notes found in: .note
  Owner                Data size 	Description
  AMDGPU               0x0000428f	NT_AMDGPU_METADATA (AMDGPU Metadata)
    AMDGPU Metadata:
        ---
amdhsa.kernels:
  - .args:
      - .offset:         0
        .size:           168
        .value_kind:     by_value
      - .name:           not_the_kernel
        .size:           8
    .group_segment_fixed_size: 2056
    .kernarg_segment_align: 8
    .language_version:
      - 2
      - 0
    .name:           _ZL3rowILi8EEvi
    .private_segment_fixed_size: 0
    .sgpr_count:     107
    .sgpr_spill_count: 21
    .vgpr_count:     118
    .vgpr_spill_count: 0
  - .group_segment_fixed_size: 0
    .name:           _Z4spilPf
    .private_segment_fixed_size: 48
    .sgpr_count:     20
    .sgpr_spill_count: 0
    .vgpr_count:     256
    .vgpr_spill_count: 11
amdhsa.target:   amdgcn-amd-amdhsa--gfx1151
amdhsa.version:
  - 1
  - 2
...
"""
DISASSEMBLY = """
row.co:	file format elf64-amdgpu

Disassembly of section .text:

0000000000001600 <.text>:
	s_code_end                                                 // 000000001600: BF9F0000

0000000000001700 <_ZL3rowILi8EEvi>:
	s_load_b64 s[2:3], s[0:1], 0x0                             // 000000001700: F4004080 F8000000
	v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[16:23], v[0:7] // 000000001708: CC414000 1C022108

0000000000001710 <L1>:
	s_endpgm                                                   // 000000001710: BFB00000
	s_code_end                                                 // 000000001714: BF9F0000
"""


def kernel(name: str = "plain", target: str = "gfx1151", source: str = "a.cu", **values: int) -> Kernel:
    """A kernel without faults."""
    fields = {"vgpr": 40, "sgpr": 20, "lds": 0, "scratch": 0, "vgpr_spills": 0, "sgpr_spills": 0}
    return Kernel(target, source, name, **({"wmma": 0, "instructions": 100} | fields | values))


def whole() -> list[Kernel]:
    """The kernels that must be there, on both targets."""
    return [kernel(f"{name}<1>", target, wmma=4) for target in TARGETS for name in resources.MATRIX_KERNELS]


def test_a_note_gives_the_fields_of_each_kernel() -> None:
    found = resources.parse_notes(NOTES)
    assert list(found) == ["_ZL3rowILi8EEvi", "_Z4spilPf"]
    row = {"vgpr": 118, "sgpr": 107, "lds": 2056, "scratch": 0, "vgpr_spills": 0, "sgpr_spills": 21}
    assert found["_ZL3rowILi8EEvi"] == row
    assert found["_Z4spilPf"]["scratch"] == 48
    assert found["_Z4spilPf"]["vgpr_spills"] == 11


def test_a_note_without_a_field_is_an_error() -> None:
    with pytest.raises(BuildError, match="vgpr_spill_count"):
        resources.parse_notes(NOTES.replace("    .vgpr_spill_count: 11\n", ""))


def test_code_without_kernels_has_no_notes() -> None:
    assert resources.parse_notes("Displaying notes found in: .note\n") == {}


def test_a_disassembly_gives_instructions_and_matrix_instructions() -> None:
    found = resources.parse_disassembly(DISASSEMBLY)
    assert found["_ZL3rowILi8EEvi"] == (2, 1)
    assert found[".text"] == (0, 0)
    assert found["L1"] == (1, 0)


def test_names_are_short_and_types_have_names() -> None:
    types = resources.ggml_types("    GGML_TYPE_F32     = 0,\n    // GGML_TYPE_Q4_2 = 4\n    GGML_TYPE_Q4_K    = 12,\n")
    assert types == {0: "F32", 4: "Q4_2", 12: "Q4_K"}
    name = "void (anonymous namespace)::tile<(ggml_type)12, __half2, 128>((anonymous namespace)::args, float*)"
    assert resources.short_name(name, types) == "tile<Q4_K, __half2, 128>"
    assert resources.short_name("void row<(ggml_type)99>(int)", types) == "row<(ggml_type)99>"
    assert resources.short_name("merge(luce_attn_args)", types) == "merge"


@pytest.mark.parametrize(("vgpr", "waves"), [(0, 16), (96, 16), (97, 12), (120, 12), (121, 10), (180, 8), (256, 5)])
def test_waves_follow_from_vector_registers(vgpr: int, waves: int) -> None:
    assert kernel(vgpr=vgpr).waves == waves


def test_kernels_that_must_be_there_and_are_have_no_faults() -> None:
    assert resources.faults([*whole(), kernel(sgpr_spills=40)], TARGETS) == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (kernel(scratch=16), "16 bytes of scratch"),
        (kernel(vgpr_spills=3), "3 vector registers spilled"),
        (kernel(instructions=1), "empty kernel"),
        (kernel("luce_mmb_tile_kernel<Q8_0>"), "expected matrix instructions"),
    ],
)
def test_faults_that_no_table_allows(bad: Kernel, words: str) -> None:
    found = resources.faults([*whole(), bad], TARGETS)
    assert len(found) == 1
    assert words in found[0]
    assert found[0].startswith(f"gfx1151 a.cu: {bad.name}")


def test_a_missing_matrix_kernel_is_a_fault_of_its_target() -> None:
    kernels = [k for k in whole() if (k.target, k.name) != ("gfx1201", "luce_attn_mma_kernel<1>")]
    assert resources.faults(kernels, TARGETS) == ["gfx1201: expected the kernel luce_attn_mma_kernel, found none"]


def test_the_table_does_not_depend_on_the_order_of_work() -> None:
    kernels = whole()
    table = resources.format_table(kernels, COMPILER)
    assert resources.format_table(reversed(kernels), COMPILER) == table
    assert resources.table_compiler(table) == COMPILER
    assert resources.table_changes(table, table, "t") == ""


def judge(kernels: list[Kernel], table: Path, compiler: str = COMPILER, *, update: bool = False) -> list[str]:
    results = [amd_check.Result(Path("a.cu"), target, [k for k in kernels if k.target == target]) for target in TARGETS]
    return amd_check.judge(results, table, compiler, TARGETS, update=update)


def test_a_change_is_a_fault_until_the_table_has_it(tmp_path: Path) -> None:
    table = tmp_path / "resources.txt"
    kernels = whole()
    assert judge(kernels, table, update=True) == []
    assert judge(kernels, table) == []
    changed = [replace(kernels[0], vgpr=41, sgpr_spills=2), *kernels[1:]]
    (text,) = judge(changed, table)
    assert "UPDATE=1" in text
    assert "-  40   20" in text
    assert "+  41   20" in text
    assert judge(changed, table, update=True) == []
    assert judge(changed, table) == []


def test_no_table_is_a_fault_or_what_an_update_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "resources.txt"
    assert judge(whole(), table, "") != []
    assert judge(whole(), table, update=True) == []
    assert table.is_file()


def test_a_table_of_another_compiler_is_shown_but_spills_still_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "resources.txt"
    judge(whole(), table, update=True)
    changed = [replace(kernel, vgpr=50) for kernel in whole()]
    assert judge(changed, table, "clang version 22") == []
    assert "another compiler" in capsys.readouterr().out
    assert len(judge([*changed, kernel(scratch=4)], table, "clang version 22")) == 1


def test_an_update_does_not_hide_spills(tmp_path: Path) -> None:
    assert len(judge([*whole(), kernel(vgpr_spills=1)], tmp_path / "t", update=True)) == 1


def test_what_does_not_compile_is_a_fault_and_leaves_the_table(tmp_path: Path) -> None:
    table = tmp_path / "resources.txt"
    judge(whole(), table, update=True)
    before = table.read_text()
    broken = [amd_check.Result(Path("a.cu"), "gfx1201", error="Cannot select intrinsic")]
    (text,) = amd_check.judge(broken, table, COMPILER, TARGETS, update=True)
    assert "a.cu does not compile for gfx1201" in text
    assert "Cannot select" in text
    assert table.read_text() == before


def fake_toolchain(folder: Path, log: Path) -> Path:
    """Programs that print the samples above; the compiler writes what it depends on, or fails for a source of its own."""
    bin_folder = folder / "llvm" / "bin"
    bin_folder.mkdir(parents=True)
    clang = f"""#!/usr/bin/env python3
import sys
if "--version" in sys.argv: print("{COMPILER}"); raise SystemExit
source = sys.argv[sys.argv.index("-c") + 1]
open("{log}", "a").write("compiled\\n")
if "error" in open(source).read(): sys.exit(source + ":1: error: no such builtin")
open(sys.argv[-1], "w").write("code")
depends = sys.argv[sys.argv.index("-dependency-file") + 2]
open(depends, "w").write("code: " + source + " \\\\\\n  " + source.replace(".cu", ".cuh") + "\\n")
"""
    texts = {"clang++": clang, "llvm-readelf": NOTES}
    texts["llvm-objdump"] = DISASSEMBLY + "0000000000001800 <_Z4spilPf>:\n\ts_endpgm\n"
    texts["llvm-cxxfilt"] = "void row<8>(int)\nspil(float*)\n"
    for name, text in texts.items():
        (bin_folder / name).write_text(text if name == "clang++" else f"#!/bin/sh\ncat <<'END'\n{text}END\n")
        (bin_folder / name).chmod(0o755)
    return folder


def test_a_second_check_compiles_only_what_changed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    header = tmp_path / "tree" / "ggml" / "include" / "ggml.h"
    header.parent.mkdir(parents=True)
    header.write_text("GGML_TYPE_F32 = 0,\n")
    source = tmp_path / "a.cu"
    source.write_text("kernel\n")
    source.with_suffix(".cuh").write_text("header\n")
    toolchain = fake_toolchain(tmp_path / "rocm", log)

    def check() -> amd_check.Result:
        return amd_check.Checker(toolchain, tmp_path / "tree", tmp_path / "cache").check(source, "gfx1151")

    first = check()
    assert first.error == ""
    assert [k.name for k in first.kernels] == ["row<8>", "spil"]
    assert (first.kernels[0].wmma, first.kernels[1].scratch) == (1, 48)
    second = check()
    assert second.kernels == first.kernels
    assert [first.compiled, second.compiled] == [True, False]
    source.with_suffix(".cuh").write_text("another header\n")
    assert check().compiled
    source.write_text("error\n")
    assert "no such builtin" in check().error
    assert "no such builtin" in check().error, "a failure must not be kept as a result"
    assert len(log.read_text().splitlines()) == 4


def test_without_a_toolchain_the_check_fails_or_is_skipped_when_optional(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*args: object, **options: object) -> Path:
        raise rocm.ToolchainUnavailable("no network")

    monkeypatch.setattr(rocm, "ensure", none)
    assert amd_check.main([]) == 1
    assert amd_check.main(["--optional"]) == 0
    assert "SKIPPED, no network" in capsys.readouterr().out


def test_the_mirror_is_the_one_of_the_host(tmp_path: Path) -> None:
    with pytest.raises(rocm.ToolchainUnavailable, match="--mirror"):
        rocm.host_mirror(tmp_path)
    (tmp_path / "sources.list").write_text("# none\ndeb [arch=amd64] http://old.example/debian stable main\n")
    assert rocm.host_mirror(tmp_path) == "http://old.example/debian"
    (tmp_path / "sources.list.d").mkdir()
    text = "Types: deb\n# URIs: http://not.example\nURIs: http://new.example/debian\nSuites: stable\n"
    (tmp_path / "sources.list.d" / "debian.sources").write_text(text)
    assert rocm.host_mirror(tmp_path) == "http://new.example/debian"


def test_a_folder_of_somebody_else_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(BuildError, match="other files"):
        rocm.ensure(tmp_path, Report(), mirror="http://mirror.example")
    assert (tmp_path / "thesis.tex").is_file()


def test_a_toolchain_in_its_place_is_taken_as_it_is(tmp_path: Path) -> None:
    marker = {"folder": str(tmp_path), "suite": rocm.SUITE, "llvm": "21", "full": False}
    (tmp_path / rocm.MARKER).write_text(json.dumps(marker))
    assert rocm.ensure(tmp_path, Report()) == tmp_path
