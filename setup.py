"""Builds the extension and the emulated driver; needs a C++17 compiler and cuda.h."""

import os
import shutil
import sys
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent


def cuda_include() -> str:
    """The folder of cuda.h: CUDA_HOME, the wheel of the build requirements, or nvcc's."""
    nvcc = shutil.which("nvcc")
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    wheels = [Path(entry) / "nvidia" for entry in sys.path]
    candidates = [Path(toolkit) / "include" for toolkit in toolkits if toolkit]
    candidates += [wheel / "cuda_runtime" / "include" for wheel in wheels]
    candidates += [wheel / "cu13" / "include" for wheel in wheels]
    candidates += [Path(nvcc).resolve().parent.parent / "include"] if nvcc else []
    candidates += [Path("/usr/local/cuda/include")]
    for candidate in candidates:
        if (candidate / "cuda.h").is_file():
            return str(candidate)
    raise SystemExit(
        "cumem: no cuda.h found. Set CUDA_HOME, or: pip install nvidia-cuda-runtime-cu12"
    )


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
