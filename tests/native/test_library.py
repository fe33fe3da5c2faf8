"""Which libraries are loaded and which are refused; the stamp."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pyluce.native import LibraryMismatchError, NativeError, declare, library, load_libraries, stamp

Run = Callable[..., subprocess.CompletedProcess[str]]

REFUSAL = """
import sys
from pathlib import Path
from pyluce.native import LibraryMismatchError, load_libraries, stamp
stamp.project_root = lambda: {root}
try:
    load_libraries()
except LibraryMismatchError as error:
    print(error)
else:
    print("loaded")
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small project tree: a pin, one patch, one source file."""
    (tmp_path / "vendor").mkdir()
    (tmp_path / "vendor" / "pin.toml").write_text('package = "x"\nversion = "1"  # comment\n')
    (tmp_path / "patches" / "src" / "ggml").mkdir(parents=True)
    (tmp_path / "patches" / "series").write_text("# order\n0001-a.patch\n")
    (tmp_path / "patches" / "0001-a.patch").write_text("--- a\n+++ b\n")
    (tmp_path / "patches" / "src" / "ggml" / "own.c").write_text("int x;\n")
    return tmp_path


def stamp_of(tree: Path) -> str:
    return stamp.format_stamp(stamp.pin_digest(tree), stamp.patches_digest(tree), "-O2 cpu", 'cc "12"')


def test_stamp_round_trip() -> None:
    text = stamp.format_stamp("abc", "def", "-O2 -DX=1", 'cc "12.2"\n')
    assert text == "pin=abc patches=def flags=-O2 -DX=1 compiler=cc 12.2"
    parts = stamp.parse_stamp(stamp.format_stamp("abc", "def", "-O2 cpu", "cc 12.2"))
    assert parts == {"pin": "abc", "patches": "def", "flags": "-O2 cpu", "compiler": "cc 12.2"}
    assert stamp.parse_stamp("nonsense") == {}


def test_a_stamp_of_the_same_tree_is_accepted(tree: Path) -> None:
    assert stamp.mismatch(stamp_of(tree), tree) is None


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("vendor/pin.toml", 'package = "x"\nversion = "2"\n', "pin"),
        ("patches/0001-a.patch", "--- a\n+++ c\n", "patches"),
        ("patches/src/ggml/own.c", "int y;\n", "patches"),
        ("patches/src/ggml/more.c", "", "patches"),
        ("patches/series", "0001-a.patch\n0001-a.patch\n", "patches"),
    ],
)
def test_any_change_of_the_source_is_noticed(tree: Path, name: str, text: str, part: str) -> None:
    found = stamp_of(tree)
    (tree / name).write_text(text)
    reason = stamp.mismatch(found, tree)
    assert reason is not None and reason.startswith(f"{part}: expected ")


def test_comments_do_not_change_the_digests(tree: Path) -> None:
    found = stamp_of(tree)
    (tree / "vendor" / "pin.toml").write_text('# the pin\n[upstream]\nversion = "1"\npackage = "x"\n')
    (tree / "patches" / "series").write_text("0001-a.patch  # first\n\n")
    assert stamp.mismatch(found, tree) is None


def test_a_pin_that_is_no_flat_toml_is_an_error(tree: Path) -> None:
    (tree / "vendor" / "pin.toml").write_text("package = [1, 2]\n")
    with pytest.raises(ValueError, match=r"pin.toml:1: expected"):
        stamp.read_pin(tree / "vendor" / "pin.toml")


def test_the_loaded_library_belongs_to_this_tree() -> None:
    libraries = load_libraries()
    assert load_libraries() is libraries
    assert stamp.parse_stamp(libraries.stamp).keys() == set(stamp.STAMP_PARTS)
    assert set(libraries.handles) == {"ggml-base", "ggml-cpu", "ggml-rpc", "ggml", "llama"}


def test_one_backend_in_a_process() -> None:
    loaded = load_libraries()
    other = "hip" if loaded.backend == "cuda" else "cuda"
    message = f"expected one set of libraries in a process: that of '{loaded.backend}' is loaded from .*, '{other}' was"
    with pytest.raises(NativeError, match=message):
        load_libraries(other)


def test_a_library_of_other_patches_is_refused(run_python: Run, tree: Path) -> None:
    program = f"import os; os.environ['LUCE_LIBRARY_DIR'] = {str(load_libraries().directory)!r}\n"
    done = run_python(program + REFUSAL.format(root=f"Path({str(tree)!r})"))
    assert "built from another source. pin: expected" in done.stdout and "found" in done.stdout, done
    assert "`python build.py --backend cpu`" in done.stdout


def test_an_installed_library_must_match_the_file_beside_it(run_python: Run, tmp_path: Path) -> None:
    directory = load_libraries().directory
    for name in ("ggml-base", "ggml-cpu", "ggml-rpc", "ggml", "llama"):
        shutil.copy(directory / f"lib{name}.so", tmp_path)
    program = f"import os; os.environ['LUCE_LIBRARY_DIR'] = {str(tmp_path)!r}\n"
    program += REFUSAL.format(root="None")
    assert "expected None (luce-build.json)" in run_python(program).stdout
    (tmp_path / "luce-build.json").write_text('{"stamp": "pin=0 patches=0 flags= compiler="}')
    assert "expected 'pin=0 patches=0 flags= compiler=' (luce-build.json)" in run_python(program).stdout
    shutil.copy(directory / "luce-build.json", tmp_path)
    assert run_python(program).stdout == "loaded\n"


def test_a_library_without_a_stamp_is_refused(run_python: Run, tmp_path: Path) -> None:
    shutil.copy(np.random._pcg64.__file__, tmp_path / "libggml-base.so")
    program = f"import os; os.environ['LUCE_LIBRARY_DIR'] = {str(tmp_path)!r}\n"
    program += REFUSAL.format(root="None")
    done = run_python(program)
    assert "found libraries without a stamp (no ggml_luce_stamp)" in done.stdout, done
    assert "`python build.py --backend cpu`" in done.stdout


def test_missing_libraries_name_where_they_were_looked_for(run_python: Run, tmp_path: Path) -> None:
    program = """
import os, sys
os.environ["LUCE_LIBRARY_DIR"] = sys.argv[1]
from pyluce.native import NativeError, ggml, load_libraries
for call in (load_libraries, ggml.ggml_tensor_overhead, lambda: ggml.ggml_free(None)):
    try: call()
    except NativeError as error: print(error)
"""
    lines = run_python(program, tmp_path).stdout.splitlines()
    assert str(tmp_path) in lines[0] and "Build them: `python build.py --backend cpu`" in lines[0]
    assert lines[1].startswith("ggml_tensor_overhead was called before the native libraries were loaded")
    assert lines[2].startswith("ggml_free was called before the native libraries were loaded")


def test_a_damaged_library_is_an_error(run_python: Run, tmp_path: Path) -> None:
    (tmp_path / "libggml-base.so").write_bytes(b"\x7fELF" + bytes(100))
    program = "import os, sys; os.environ['LUCE_LIBRARY_DIR'] = sys.argv[1]\n"
    program += "from pyluce.native import load_libraries, NativeError\n"
    program += "try: load_libraries()\nexcept NativeError as error: print(error)"
    assert "cannot load" in run_python(program, tmp_path).stdout


def test_a_missing_symbol_names_itself() -> None:
    handle = load_libraries().handles["ggml"]
    entry = declare.Declaration(
        "ggml", "ggml_no_such_function", None, [], declare.UnboundFunction(0), declare.CFunction
    )
    with pytest.raises(NativeError, match="expected the function ggml_no_such_function in .*libggml.so, found none"):
        declare._bind_one(entry, handle)


def test_an_unknown_annotation_is_refused() -> None:
    def stub(a: str) -> None: ...

    with pytest.raises(TypeError, match="stub: expected an alias of pyluce.native.declare, found"):
        declare.function("ggml")(stub)


def test_declared_names_are_plain_c_functions() -> None:
    load_libraries()
    for entry in declare.declarations.values():
        assert type(entry.pointer) in (declare.CFunction, declare.QuickFunction), entry.name


def test_environment_directory_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(library.LIBRARY_DIR_VARIABLE, str(tmp_path))
    assert library.search_path("cpu") == [tmp_path]
    monkeypatch.delenv(library.LIBRARY_DIR_VARIABLE)
    assert [path.parts[-2:] for path in library.search_path("cpu")][0] == ("lib", "cpu")


def test_check_stamp_names_the_command() -> None:
    with pytest.raises(LibraryMismatchError, match="python build.py --backend hip"):
        library.check_stamp(None, Path("/nowhere"), "hip")
