"""Where is cuda.h? Asked by setup.py and by the C++ tests."""

import os
import shutil
import sys
from pathlib import Path


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


if __name__ == "__main__":
    print(cuda_include())
