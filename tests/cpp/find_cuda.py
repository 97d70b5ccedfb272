"""Prints the folder of cuda.h, as setup.py finds it."""

import os
import shutil
import sys
from pathlib import Path

candidates = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
candidates += [Path(entry) / "nvidia" / part / "include" for entry in sys.path for part in ("cuda_runtime", "cu13")]
candidates += [Path(nvcc).resolve().parent.parent / "include" for nvcc in [shutil.which("nvcc")] if nvcc]
print(next((str(path) for path in candidates if (path / "cuda.h").is_file()), "cuda.h-not-found"))
