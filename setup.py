"""Builds a wheel for every system, or with ASSISTED_LIBRARIES=1 one for this system, with its libraries in C.

CC names the compiler, `cc` if it is left out. For another system, _PYTHON_HOST_PLATFORM names it, as in "linux-aarch64", and CC
a compiler for it.
"""

import os
import runpy
import shutil
import sysconfig
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HAS_LIBRARIES = os.environ.get("ASSISTED_LIBRARIES", "0") not in ("", "0")


class WithLibraries(build_py):
    """The package, and the libraries of a system."""

    def run(self):
        super().run()
        folder = Path(self.build_lib, "assisted", "fast", "prebuilt")
        if self.editable_mode:
            return
        shutil.rmtree(folder, ignore_errors=True)  # of another build
        if HAS_LIBRARIES:
            system, *_, machine = sysconfig.get_platform().split("-")  # "linux-x86_64", "macosx-11.0-arm64"
            variants = runpy.run_path(str(Path(__file__).parent / "assisted" / "fast" / "variants.py"))
            variants["build"](folder, system, machine, os.environ.get("CC", "cc").split())


class ForOneSystem(bdist_wheel):
    """A wheel for every Python of a system."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


if HAS_LIBRARIES:
    Distribution.has_ext_modules = lambda self: True  # the package lies where compiled code does
setup(cmdclass={"build_py": WithLibraries, **({"bdist_wheel": ForOneSystem} if HAS_LIBRARIES else {})})
