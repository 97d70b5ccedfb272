"""Where does memory go while Qwen3.5-2B is built and loaded, beside a published table?

    python benchmarks/model_loading.py --json loading.json

README.md beside this file says what each number means.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine import describe, synchronize
from processes import command_of, say, write_json
from qwen import EXTRA_ROW, PUBLISHED, PUBLISHED_PAYLOAD, SIZES, write_checkpoint
from settings import MIB, add_json
from tables import EMULATED, text_table

import cumem
from cumem._demo_folder import FolderModel

TAG = "weights"
_COLUMNS = ("boundary", "", "live MiB", "reserved MiB", "tracked MiB", "segments", "used MiB")
_FLAT = ("live_bytes", "reserved_bytes", "tracked_bytes", "segments", "device_used_bytes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it; returns the exit status: 1 when a boundary is not what it should be."""
    chosen = _parser().parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="cumem-qwen-", dir=chosen.folder))
    try:
        result = run(folder, chosen.size)
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    result["command"] = command_of(
        "model_loading.py", sys.argv[1:] if arguments is None else arguments
    )
    print(to_text(result))
    if chosen.json:
        write_json(chosen.json, result)
    return 0 if all(result["checks"].values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="2b", help="which architecture")
    parser.add_argument("--folder", help="where the checkpoint is written (default: TMPDIR)")
    add_json(parser)
    return parser


def run(folder: Path, size: str) -> dict[str, Any]:
    """Writes a checkpoint, builds and loads the model in a pool; returns what was seen."""
    device = cumem.default_device()
    _warm_up(folder, device)
    say("writing a checkpoint of random weights")
    payload = write_checkpoint(folder, SIZES[size])
    subject = FolderModel(folder)
    say("building and loading the model")
    with cumem.Timeline() as timeline:
        with cumem.use_memory_pool(TAG):
            timeline.mark("before model constructor")
            module = subject.build(device)
            timeline.mark("after constructor")
            seconds = _timed(lambda: subject.load(module), device)
            timeline.mark("after checkpoint copy")
        module.tie_weights()
        timeline.mark("after post-load hooks")
        outside = cumem.covered(module, TAG)
        if adopt := getattr(cumem, "adopt", None):
            adopt(module, TAG)
            gc.collect()
            cumem.trim(TAG)
            timeline.mark(EXTRA_ROW)
    marks = [vars(mark) | {"tags": [vars(tag) for tag in mark.tags]} for mark in timeline.marks]
    return {
        "environment": describe(device),
        "model": subject.title.partition(" from ")[0],
        "size": size,
        "payload_bytes": payload,
        "load_seconds": seconds,
        "module_bytes": _distinct_bytes(module),
        "marks": marks,
        "checks": _checks(marks, outside, payload, size),
    }


def _warm_up(folder: Path, device: torch.device) -> None:
    """Builds and loads a tiny model first, in a pool that goes again.

    The driver takes device memory for each kernel and for the stream of the loads at their
    first use (2 MiB were seen for the latter): it would be counted as the model's.
    """
    write_checkpoint(folder, SIZES["tiny"])
    subject = FolderModel(folder)
    with cumem.use_memory_pool("warm-up"):
        module = subject.build(device)
    subject.load(module)
    del module
    gc.collect()
    cumem.trim("warm-up")
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _timed(work: Any, device: torch.device) -> float:
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def _distinct_bytes(module: torch.nn.Module) -> int:
    """Parameters and buffers, tied ones once."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _checks(
    marks: Sequence[dict[str, Any]], outside: Sequence[str], payload: int, size: str
) -> dict[str, bool]:
    """What the published table shows, as statements about ours."""
    before, built, copied, finished = marks[:4]
    tracked = built["tracked_bytes"] - before["tracked_bytes"]
    checks = {
        "use of the device rises by exactly the tracked bytes in the constructor": (
            built["device_used_bytes"] - before["device_used_bytes"] == tracked
        ),
        "the copy of the checkpoint adds nothing: all counters are flat": _same(built, copied),
        "post-load adds nothing": _same(copied, finished),
        "every parameter and buffer is in the pool": not outside,
    }
    if size == "2b":
        checks["the checkpoint has the published payload, to the byte"] = (
            payload == PUBLISHED_PAYLOAD
        )
    if len(marks) > 4:
        last = marks[4]
        live = sum(tag["live_bytes"] for tag in last["tags"])
        checks["after adopt: segments are at most 1.01 of live bytes and 2 MiB"] = (
            last["tracked_bytes"] <= 1.01 * live + 2 * MIB
        )
    return checks


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in _FLAT)


def to_text(result: dict[str, Any]) -> str:
    """Both tables, row by row, and what holds."""
    rows = []
    for mark in result["marks"]:
        published = PUBLISHED.get(mark["label"]) if result["size"] == "2b" else None
        rows.append((mark["label"], "here", *_cells(mark)))
        if published:
            rows.append(("", "published", *published))
    emulated = [EMULATED] if result["environment"]["emulated"] else []
    return "\n".join(
        [
            f"{result['model']}, {result['size']}: checkpoint of {result['payload_bytes']} bytes, "
            f"{result['module_bytes']} bytes of parameters and buffers, "
            f"copied in {result['load_seconds']:.2f} s",
            *emulated,
            "",
            text_table(_COLUMNS, rows),
            "",
            *(f"{'yes' if held else 'NO ':<4}{what}" for what, held in result["checks"].items()),
        ]
    )


def _cells(mark: dict[str, Any]) -> tuple[str, ...]:
    return (
        *(f"{mark[name] / MIB:,.2f}" for name in ("live_bytes", "reserved_bytes")),
        f"{mark['tracked_bytes'] / MIB:,.2f}",
        str(mark["segments"]),
        f"{mark['device_used_bytes'] / MIB:,.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
