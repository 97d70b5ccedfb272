"""Three models share a device that has room for two of them.

    python examples/switch_models.py [--mib 8] [--requests 24]

Requests come for one model or the other; the host wakes the one that is asked for and puts
the least recently used idle one to sleep. Without a GPU, set CUMEM_DRIVER=emulated.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import cumem
from cumem.serving import ModelHost

NAMES = ("small-talk", "translator", "coder")
LAYERS = 4


def layers(width: int, device: torch.device) -> torch.nn.Module:
    parts = [torch.nn.Linear(width, width, bias=False, device=device) for _ in range(LAYERS)]
    return torch.nn.Sequential(*parts).requires_grad_(requires_grad=False)


def write_checkpoint(folder: Path, name: str, width: int) -> Path:
    """A checkpoint whose model multiplies its input by a number of its own."""
    number = 2.0 + NAMES.index(name)
    weights = {
        f"{at}.weight": torch.eye(width) * (number if at == 0 else 1) for at in range(LAYERS)
    }
    path = folder / f"{name}.safetensors"
    save_file(weights, path)
    return path


async def client(host: ModelHost, name: str, width: int) -> float:
    """One request; returns seconds until its answer."""
    started = time.perf_counter()
    async with host.use(name) as model:
        answer = model(torch.ones(1, width, device=cumem.default_device()))
        assert torch.all(answer == 2.0 + NAMES.index(name)), name
    return time.perf_counter() - started


async def serve(folder: Path, width: int, requests: int) -> None:
    device = cumem.default_device()
    model_bytes = LAYERS * width * width * 4
    room = 2 * (model_bytes + 20 * (1 << 20))  # the last of torch's segments may be half empty
    async with ModelHost(room) as host:
        for name in NAMES:
            file = write_checkpoint(folder, name, width)
            host.add(name, lambda: layers(width, device), file)
        chance = random.Random(1)
        wanted = [chance.choice(NAMES) for _ in range(requests)]
        for start in range(0, requests, 4):  # four at a time
            group = wanted[start : start + 4]
            seconds = await asyncio.gather(*(client(host, name, width) for name in group))
            print(", ".join(f"{n} {s:.3f} s" for n, s in zip(group, seconds, strict=True)))
        host.prewake(NAMES[0])  # it will be asked for first tomorrow
        print(host.status())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=8, help="size of each model")
    parser.add_argument("--requests", type=int, default=24)
    asked = parser.parse_args()
    width = int((asked.mib * (1 << 20) / LAYERS / 4) ** 0.5)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(serve(Path(folder), width, asked.requests))


if __name__ == "__main__":
    main()
