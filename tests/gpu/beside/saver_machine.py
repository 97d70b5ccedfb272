"""What is a program for torch_memory_saver, and what does it know of its machine?

Nothing here imports either library: the same lines run with each, in a process of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

MIB = 1 << 20
_WORD = 8

DONE = "done"
ENDS = "the process ends"

Value = bool | str | float
Observations = Iterator[tuple[str, Value]]


def attempt(call: Callable[[], object]) -> str:
    """``"done"``, or the name of the exception that ``call`` raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - which one it is, is what is looked at
        return type(error).__name__
    return DONE


@dataclass(frozen=True)
class Machine:
    """Where a program runs, and how it sees what it did.

    Attributes:
        device: where tensors are made.
        size: bytes of a tensor; above 10 MiB, so that each has a segment of its own.
        free_bytes: free memory of a device by its number, as the driver says.
        graphs: CUDA graphs can be captured.
        devices: how many there are.
    """

    device: torch.device
    size: int
    free_bytes: Callable[[int], int]
    graphs: bool = False
    devices: int = 1

    def empty(self, tensors: float = 1, device: torch.device | None = None) -> torch.Tensor:
        """A tensor of ``size`` times ``tensors`` bytes, made where the innermost region says."""
        words = int(self.size * tensors) // _WORD
        return torch.empty(words, dtype=torch.int64, device=device or self.device)

    def fill(self, tensor: torch.Tensor, seed: int) -> torch.Tensor:
        """Words that depend on their place and ``seed``; to be called outside of regions."""
        return tensor.copy_(_words(tensor, seed))

    def holds(self, tensor: torch.Tensor, seed: int) -> bool:
        """Is every word of ``tensor`` what :meth:`fill` gave it?"""
        return torch.equal(tensor, _words(tensor, seed))

    def freed(self, call: Callable[[], object], device: int = 0) -> float:
        """What ``call`` gives back to the driver, in tensors: 1.0 is ``size`` bytes."""
        self.wait()
        before = self.free_bytes(device)
        call()
        self.wait()
        return round((self.free_bytes(device) - before) / self.size, 2)

    def wait(self) -> None:
        """Waits for all work of all devices."""
        for index in range(self.devices if self.device.type == "cuda" else 0):
            torch.cuda.synchronize(index)

    def forget_caches(self) -> None:
        """Lets torch give back what freed tensors left in its caches."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def captured(self, body: Callable[[], object]) -> Callable[[], None]:
        """What replays ``body``: a graph of torch's, or without graphs the body itself."""
        if not self.graphs:
            return lambda: (body(), None)[1]
        body()  # outside of a capture first: kernels are loaded
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        return graph.replay


@dataclass(frozen=True)
class Difference:
    """Of the original from the drop-in.

    Attributes:
        theirs: what the original shows.
        always: False: depending on torch's version it shows what the drop-in does.
    """

    theirs: Value
    always: bool = True


@dataclass(frozen=True)
class Scenario:
    """A program, and what is to be seen.

    Attributes:
        original: how the original is used: ``"tms"``, in its mode for pools of torch's,
            or ``"tms-preload"``, with its library preloaded.
    """

    program: Callable[[Any, Machine], Observations]
    expected: Mapping[str, Value]
    differs: Mapping[str, Difference] = field(default_factory=dict)
    needs_graphs: bool = False
    needs_devices: int = 1
    original: str = "tms"

    def lacks(self, machine: Machine) -> str:
        """The capability that ``machine`` does not have; empty when it has all."""
        if self.needs_graphs and not machine.graphs:
            return "CUDA graphs"
        return "second device" if machine.devices < self.needs_devices else ""


def _words(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    place = torch.arange(tensor.numel(), dtype=torch.int64, device=tensor.device)
    return place.add_((seed + 1) << 40).mul_(0x2545F4914F6CDD1D)
