"""What pyproject.toml cannot say: a wheel carries the profiles, and the native CPU libraries, built by build.py on the machine that installs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

import build as native  # noqa: E402
from buildtools.compile import LIBRARIES  # noqa: E402


class BuildWithLibraries(build_py):
    """Copies the Python files and the profiles, then builds the CPU libraries and puts them beside the loader.

    An editable install copies nothing: there ``profiles`` and ``build/cpu/bin`` are found in the tree.
    """

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if self.editable_mode:
            return
        shutil.copytree(ROOT / "profiles", Path(self.build_lib) / "pyluce" / "data" / "profiles", dirs_exist_ok=True)
        if native.main([]) != 0:
            raise SystemExit("the native libraries could not be built; the reason is above")
        source = ROOT / "build" / "cpu" / "bin"
        target = Path(self.build_lib) / "pyluce" / "native" / "lib" / "cpu"
        target.mkdir(parents=True, exist_ok=True)
        for name in (*LIBRARIES, native.load_stamp().BUILD_INFO_NAME):
            shutil.copy2(source / name, target / name)
        shutil.copy2(ROOT / "vendor" / "src" / "LICENSE", target / "LICENSE.llama.cpp")


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and any Python 3: the libraries are loaded with ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class NativeDistribution(Distribution):
    """Has files for one platform, though no extension module."""

    def has_ext_modules(self) -> bool:
        return True


setup(distclass=NativeDistribution, cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": PlatformWheel})
