"""Builds the extension and the emulated driver; needs a C++17 compiler and cuda.h."""

import os
import runpy
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent


cuda_include = runpy.run_path(str(ROOT / "csrc" / "find_cuda.py"))["cuda_include"]


def sources(*folders: str) -> list[str]:
    """Source files of folders below csrc, in a stable order."""
    return [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in sorted((ROOT / "csrc" / folder).glob("*.cpp"))
    ]


def flags() -> list[str]:
    strict = ["-Wall", "-Wextra", "-Werror"] if os.environ.get("CUMEM_STRICT") else []
    # -isystem: warnings in NVIDIA's header are not ours.
    return ["-std=c++17", "-O2", "-g0", "-fvisibility=hidden", "-isystem", cuda_include(), *strict]


class Build(build_ext):
    """Compiles sources in parallel."""

    def build_extensions(self) -> None:
        with ParallelCompile("CUMEM_BUILD_JOBS", default=0):
            super().build_extensions()


setup(
    ext_modules=[
        Pybind11Extension(
            "cumem._C",
            sources("core", "torch", "python"),
            include_dirs=["csrc"],
            extra_compile_args=flags(),
            libraries=["dl", "pthread"],
        ),
        Extension(
            "cumem._emulator_driver",
            sources("emulator"),
            include_dirs=["csrc"],
            extra_compile_args=flags(),
            libraries=["pthread"],
            language="c++",
        ),
    ],
    cmdclass={"build_ext": Build},
)
