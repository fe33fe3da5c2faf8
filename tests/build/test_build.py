"""The build's own steps on a tiny source archive: no network, no compiler, no CMake."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

import build
from buildtools import compile as compiling
from buildtools import sources
from buildtools.report import BuildError, Report
from buildtools.unified_diff import apply_diff

REPOSITORY = Path(__file__).resolve().parents[2]
HELLO = "one\ntwo\nthree\nfour\nfive\nsix\nseven\n"
PATCH = """hook: say deux
--- a/ggml/hello.c
+++ b/ggml/hello.c
@@ -1,3 +1,3 @@
 one
-two
+deux
 three
"""
CPU = compiling.Options("cpu", "", None, portable=False, bench=False, jobs=1)


class Project:
    """A project folder with a pin, a source archive and an empty patch set."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.archive = root / "tiny-1.0.tar.gz"
        self.tree = root / "vendor" / "src"
        (root / "vendor").mkdir(parents=True)
        (root / "patches" / "src").mkdir(parents=True)
        (root / "pyluce" / "native").mkdir(parents=True)
        shutil.copy(REPOSITORY / "pyluce" / "native" / "stamp.py", root / "pyluce" / "native" / "stamp.py")
        (root / "patches" / "series").write_text("# nothing yet\n")
        self.write_archive({"ggml/hello.c": HELLO, "ggml/other.c": "other\n", "models/big.bin": "not wanted\n"})

    @property
    def stamp(self) -> ModuleType:
        return build.load_stamp(self.root)

    def write_archive(self, files: dict[str, str]) -> None:
        with tarfile.open(self.archive, "w:gz") as tar:
            for path, text in files.items():
                member = tarfile.TarInfo(f"tiny-1.0/up/{path}")
                member.size = len(text.encode())
                tar.addfile(member, io.BytesIO(text.encode()))
        sha256 = hashlib.sha256(self.archive.read_bytes()).hexdigest()
        pin = {"package": "tiny", "version": "1.0", "sha256": sha256, "path": "up", "parts": "ggml src"}
        pin |= {"tag": "b1", "licence": "MIT"}
        (self.root / "vendor" / "pin.toml").write_text("".join(f'{key} = "{value}"\n' for key, value in pin.items()))

    def add_patch(self, name: str, text: str) -> None:
        (self.root / "patches" / name).write_text(text)
        with (self.root / "patches" / "series").open("a") as series:
            series.write(f"{name}  # a hook\n")

    def prepare(self, *, discard_edits: bool = False) -> str:
        out = io.StringIO()
        build.prepare_tree(self.root, self.stamp, self.archive, Report(out), discard_edits=discard_edits)
        return out.getvalue()

    def read(self, path: str) -> str:
        return (self.tree / path).read_text()

    def times(self) -> dict[str, int]:
        return {str(p.relative_to(self.tree)): p.stat().st_mtime_ns for p in self.tree.rglob("*.[ch]")}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_only_the_pinned_parts_are_unpacked(project: Project) -> None:
    assert "2 files written" in project.prepare()
    assert project.read("ggml/hello.c") == HELLO
    assert not (project.tree / "models").exists()


def test_a_path_that_leaves_the_tree_is_refused(project: Project) -> None:
    project.write_archive({"ggml/../../../escape.c": "x"})
    with pytest.raises(BuildError, match="leaves the source tree"):
        project.prepare()


def test_hash_mismatch_says_expected_and_found(project: Project) -> None:
    expected = sources.load_pin(project.root, project.stamp).sha256
    with project.archive.open("ab") as file:
        file.write(b"tampered")
    found = hashlib.sha256(project.archive.read_bytes()).hexdigest()
    with pytest.raises(BuildError) as error:
        project.prepare()
    assert f"expected SHA-256 {expected}" in str(error.value)
    assert f"found    SHA-256 {found}" in str(error.value)
    assert not project.tree.exists()


def test_series_is_applied_in_order_and_names_missing_files(project: Project) -> None:
    project.add_patch("0001-deux.patch", PATCH)
    project.add_patch("0002-zwei.patch", PATCH.replace("-two", "-deux").replace("+deux", "+zwei"))
    assert project.stamp.read_series(project.root / "patches") == ["0001-deux.patch", "0002-zwei.patch"]
    project.prepare()
    assert project.read("ggml/hello.c") == HELLO.replace("two", "zwei")
    (project.root / "patches" / "0002-zwei.patch").unlink()
    with pytest.raises(BuildError, match=r"0002-zwei\.patch"):
        sources.patched(project.root, {"ggml/hello.c": HELLO.encode()}, project.stamp)


def test_a_patch_that_does_not_fit_is_named_with_its_hunk(project: Project) -> None:
    second = "@@ -5,3 +5,3 @@\n five\n-sechs\n+VI\n seven\n"
    project.add_patch("0001-fits-not.patch", PATCH + second)
    with pytest.raises(BuildError) as error:
        project.prepare()
    message = str(error.value)
    assert "patch 0001-fits-not.patch does not apply: ggml/hello.c, hunk 2 of 2" in message
    assert "expected at line 6: sechs" in message
    assert "found:                six" in message
    assert not project.tree.exists()


def test_a_moved_hunk_is_found_and_a_changed_context_is_not(project: Project) -> None:
    moved = {"ggml/hello.c": ("zero\n" * 3 + HELLO).encode()}
    assert apply_diff("p", PATCH, moved) == ["ggml/hello.c"]
    assert moved["ggml/hello.c"].decode() == "zero\n" * 3 + HELLO.replace("two", "deux")
    with pytest.raises(BuildError, match="patch p does not apply"):
        apply_diff("p", PATCH, {"ggml/hello.c": HELLO.replace("three", "drei").encode()})


@pytest.mark.parametrize(
    ("before", "hunk", "after"),
    [
        ("a\nb", "@@ -1,2 +1,2 @@\n a\n-b\n\\ No newline at end of file\n+c\n", "a\nc\n"),
        ("a\nb\n", "@@ -1,2 +1,2 @@\n a\n-b\n+c\n\\ No newline at end of file\n", "a\nc"),
        ("a\n\nb\n", "@@ -1,3 +1,4 @@\n a\n\n+new\n b\n", "a\n\nnew\nb\n"),
        ("a\x0cb\nc\n", "@@ -2 +2 @@\n-c\n+d\n", "a\x0cb\nd\n"),
        ("a\nb\n", "@@ -1,0 +2,1 @@\n+x\n", "a\nx\nb\n"),
    ],
    ids=["adds-line-end", "drops-line-end", "bare-empty-line", "form-feed", "no-context"],
)
def test_diff_corner_cases(before: str, hunk: str, after: str) -> None:
    files = {"f.c": before.encode()}
    apply_diff("p", f"--- a/f.c\n+++ b/f.c\n{hunk}", files)
    assert files["f.c"].decode() == after


def test_new_files_belong_into_patches_src(project: Project) -> None:
    project.add_patch("0001-new.patch", "--- /dev/null\n+++ b/ggml/new.c\n@@ -0,0 +1 @@\n+x\n")
    with pytest.raises(BuildError, match=r"patches/src"):
        project.prepare()


def test_own_sources_are_copied_and_may_not_replace_upstream(project: Project) -> None:
    own = project.root / "patches" / "src" / "ggml"
    own.mkdir()
    (own / "luce.c").write_text("ours\n")
    project.prepare()
    assert project.read("ggml/luce.c") == "ours\n"
    (own / "luce.c").unlink()
    project.prepare()
    assert not (project.tree / "ggml" / "luce.c").exists()
    (own / "hello.c").write_text("ours\n")
    with pytest.raises(BuildError, match="would replace an upstream file"):
        project.prepare()


def test_only_files_whose_content_changes_are_written(project: Project) -> None:
    project.prepare()
    pristine = project.times()
    assert project.prepare() == ""
    project.add_patch("0001-deux.patch", PATCH)
    assert "1 patches, 1 files written" in project.prepare()
    patched = project.times()
    assert {path for path in patched if patched[path] != pristine[path]} == {"ggml/hello.c"}
    (project.root / "patches" / "series").write_text("")
    assert "0 patches, 1 files written" in project.prepare()
    assert project.read("ggml/hello.c") == HELLO
    assert project.times()["ggml/other.c"] == pristine["ggml/other.c"]


def test_edits_by_hand_are_not_overwritten(project: Project) -> None:
    project.prepare()
    (project.tree / "ggml" / "other.c").write_text("my work\n")
    with pytest.raises(BuildError, match=r"changed by hand: ggml/other\.c"):
        project.prepare()
    assert project.read("ggml/other.c") == "my work\n"
    project.prepare(discard_edits=True)
    assert project.read("ggml/other.c") == "other\n"


def test_an_interrupted_sync_is_taken_up_again(project: Project) -> None:
    project.prepare()
    (project.tree / sources.MANIFEST_NAME).unlink()
    (project.tree / "ggml" / "hello.c").write_text("half writ")
    before = project.times()["ggml/other.c"]
    project.prepare()
    assert project.read("ggml/hello.c") == HELLO
    assert project.times()["ggml/other.c"] == before


def test_the_stamp_follows_the_patches_and_our_sources(project: Project) -> None:
    def line() -> str:
        return build.expected_stamp(project.root, project.stamp, CPU, 'c++ "12"')

    seen = [line()]
    assert '"' not in seen[0]
    assert line() == seen[0]
    project.add_patch("0001-deux.patch", PATCH)
    seen.append(line())
    (project.root / "patches" / "0001-deux.patch").write_text(PATCH.replace("+deux", "+zwei"))
    seen.append(line())
    (project.root / "patches" / "src" / "luce.c").write_text("ours\n")
    seen.append(line())
    project.write_archive({"ggml/hello.c": HELLO + "eight\n"})
    seen.append(line())
    assert len(set(seen)) == len(seen)


def test_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"apt-get install g\+\+"):
        compiling.describe_compilers(CPU)
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(BuildError, match="no-such-compiler"):
        compiling.describe_compilers(CPU)
    cuda = compiling.Options("cuda", "90a", tmp_path, portable=False, bench=False, jobs=1)
    with pytest.raises(BuildError, match="--cuda-toolkit"):
        compiling.cuda_compiler(cuda)
    hip = compiling.Options("hip", "gfx1151", tmp_path, portable=False, bench=False, jobs=1)
    with pytest.raises(BuildError, match="--rocm"):
        compiling.hip_compiler(hip)


def test_wrong_pin_keys_are_refused(project: Project) -> None:
    (project.root / "vendor" / "pin.toml").write_text('package = "tiny"\n')
    with pytest.raises(BuildError, match="expected the keys"):
        project.prepare()


FAKE_CMAKE = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = -B ] && folder=$2; shift; done
touch "$folder/build.ninja"
echo run >> "$folder/cmake-runs"
"""
FAKE_NINJA = """#!/bin/sh
mkdir -p "$2/bin"
cd "$2"
for lib in libggml-base libggml-cpu libggml-rpc libggml libllama; do [ -f bin/$lib.so ] || echo $lib > bin/$lib.so; done
echo "[1/1] Linking bin/libllama.so"
"""


@pytest.fixture
def fake_tools(tmp_path: Path, project: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for CMake, Ninja and the compiler: shell scripts that the tests can rewrite."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("cmake", FAKE_CMAKE), ("ninja", FAKE_NINJA), ("c++", "#!/bin/sh\necho fake c++ 1.0\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setattr(compiling, "find_tool", lambda root, name: str(tools / name))
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CXX", raising=False)
    return tools


def run_build(project: Project) -> str:
    out = io.StringIO()
    build.build(project.root, CPU, project.archive, Report(out), discard_edits=False)
    return out.getvalue()


def test_build_writes_the_stamp_and_check_sees_every_change(project: Project, fake_tools: Path) -> None:
    assert "no finished build" in build.check(project.root, CPU)[0]
    run_build(project)
    folder = project.root / "build" / "cpu"
    info = json.loads((folder / "bin" / "luce-build.json").read_text())
    assert f'"{info["stamp"]}"' in (folder / build.STAMP_HEADER).read_text()
    assert "fake c++ 1.0" in info["stamp"]
    assert build.check(project.root, CPU) == []
    portable = compiling.Options("cpu", "", None, portable=True, bench=True, jobs=1)
    assert build.check(project.root, portable)[0].startswith("flags: expected cpu GGML_NATIVE=OFF")
    assert any("llama-bench: missing" in line for line in build.check(project.root, portable))

    (folder / "bin" / "libllama.so").write_text("swapped")
    assert any("libllama.so: not the file" in line for line in build.check(project.root, CPU))
    (folder / "bin" / "libllama.so").unlink()
    assert any("libllama.so: missing" in line for line in build.check(project.root, CPU))
    run_build(project)
    assert build.check(project.root, CPU) == []
    project.add_patch("0001-deux.patch", PATCH)
    assert any(line.startswith("patches: expected") for line in build.check(project.root, CPU))


def test_cmake_runs_again_only_when_something_changed(
    project: Project, fake_tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = project.root / "build" / "cpu" / "cmake-runs"
    header = project.root / "build" / "cpu" / build.STAMP_HEADER
    run_build(project)
    written = header.stat().st_mtime_ns
    run_build(project)
    assert runs.read_text() == "run\n"
    assert header.stat().st_mtime_ns == written
    (fake_tools / "c++").write_text("#!/bin/sh\necho fake c++ 2.0\n")
    assert "another compiler" in run_build(project)
    assert runs.read_text() == "run\n"
    shutil.copy(fake_tools / "cmake", fake_tools / "another-cmake")
    monkeypatch.setattr(compiling, "find_tool", lambda root, name: str(fake_tools / name.replace("cm", "another-cm")))
    run_build(project)
    assert runs.read_text() == "run\n"
    (fake_tools / "cmake").unlink()
    run_build(project)
    assert runs.read_text() == "run\nrun\n"


def test_a_compiler_error_shows_its_first_failure_and_the_log(project: Project, fake_tools: Path) -> None:
    script = "for i in $(seq 99); do echo noise $i; done; echo 'FAILED: ggml/luce.o'; echo 'luce.c:7: error'; exit 1\n"
    (fake_tools / "ninja").write_text("#!/bin/sh\n" + script)
    with pytest.raises(BuildError) as error:
        run_build(project)
    assert "luce.c:7: error" in str(error.value)
    assert "noise" not in str(error.value)
    assert "build.log" in str(error.value)
    (fake_tools / "cmake").write_text("#!/bin/sh\necho 'CMake Error: too old'\nexit 1\n")
    shutil.rmtree(project.root / "build")
    with pytest.raises(BuildError, match="CMake Error: too old"):
        run_build(project)
