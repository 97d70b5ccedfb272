"""Does memory come back from the file it was loaded from, and only if that is what it was?"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import host_tensor, write_file, write_shards
from support import (
    MIB,
    DriverUnderTest,
    fill_pattern,
    holds_pattern,
    raw,
    same_bytes,
    state,
    tag_stats,
)

import cumem

KIB = 1 << 10
PIECE = 2 * MIB  # what one digest stands for


@pytest.fixture(autouse=True)
def small_steps() -> None:
    configure()


def configure(**settings: object) -> None:
    cumem.configure(
        cumem.Options(
            load_buffer_bytes=256 * KIB,
            load_ring_bytes=MIB,
            load_threads=2,
            **settings,  # type: ignore[arg-type]
        )
    )


TENSORS = {
    "first": host_tensor(torch.uint8, (3 * MIB + 5,), 1),
    "odd": host_tensor(torch.bfloat16, (33, 7), 2),
    "last": host_tensor(torch.float32, (300, 1000), 3),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_file(tmp_path / "model.safetensors", TENSORS)


@pytest.fixture
def loaded(path: Path) -> Iterator[dict[str, torch.Tensor]]:
    tensors = cumem.load_file(path, on_sleep="reload")
    yield tensors
    tensors.clear()


def intact(loaded: dict[str, torch.Tensor], *names: str) -> bool:
    return all(same_bytes(loaded[name], TENSORS[name]) for name in names or TENSORS)


def has_digests() -> bool:
    """Can the device compute digests? (A machine may lack what compiles the kernel.)"""
    with cumem.use_memory_pool("probe"):
        probe = torch.ones(10, device=cumem.default_device())
    report = cumem.sleep(tags=["probe"])
    cumem.wake_up(["probe"])
    del probe
    cumem.trim("probe")
    return report.clean_check == "digest"


@pytest.fixture(autouse=True)
def digests_are_there(small_steps: None, driver: DriverUnderTest) -> None:
    if not has_digests():
        pytest.skip("the device computes no digests")


def test_unchanged_memory_needs_no_host_copy(
    driver: DriverUnderTest, loaded: dict[str, torch.Tensor]
) -> None:
    places = {name: tensor.data_ptr() for name, tensor in loaded.items()}
    used = driver.used_bytes()
    for _ in range(3):
        report = cumem.sleep()
        assert (report.copied_bytes, report.disk_bytes) == (0, 0)
        assert report.reload_bytes == sum(tensor.nbytes for tensor in TENSORS.values())
        assert report.discarded_bytes == 0
        assert cumem.stats().host_used_bytes == 0
        assert driver.used_bytes() < used
        cumem.check()
        woken = cumem.wake_up()
        assert woken.restored_bytes == report.reload_bytes
        assert woken.undefined == frozenset()
        assert {name: tensor.data_ptr() for name, tensor in loaded.items()} == places
        assert intact(loaded)


def test_what_was_written_since_is_noticed_and_comes_back_as_written(
    loaded: dict[str, torch.Tensor],
) -> None:
    fill_pattern(loaded["odd"], 77)
    report = cumem.sleep()
    assert 0 < report.copied_bytes <= PIECE
    assert report.reload_bytes >= PIECE
    assert cumem.stats().host_used_bytes >= report.copied_bytes
    cumem.wake_up()
    assert holds_pattern(loaded["odd"], 77)
    assert intact(loaded, "first", "last")
    assert cumem.sleep().copied_bytes == 0  # the backup of what was written is kept
    cumem.wake_up()
    assert holds_pattern(loaded["odd"], 77)
    assert intact(loaded, "first", "last")


def test_what_is_written_back_is_the_files_again(loaded: dict[str, torch.Tensor]) -> None:
    loaded["odd"].zero_()
    cumem.sleep()
    cumem.wake_up()
    loaded["odd"].copy_(TENSORS["odd"])
    report = cumem.sleep()
    assert (report.copied_bytes, cumem.stats().host_used_bytes) == (0, 0)
    cumem.wake_up()
    assert intact(loaded)


def test_a_file_without_a_name_is_still_there(path: Path, loaded: dict[str, torch.Tensor]) -> None:
    path.unlink()
    write_file(path, {"other": host_tensor(torch.uint8, (10,), 9)})
    cumem.sleep()
    cumem.wake_up()
    assert intact(loaded)


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"other bytes")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def alter_header(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(12)
        file.write(b"X")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = [touch, rewrite, cut, alter_header]


@pytest.mark.parametrize("change", CHANGES)
def test_a_sleep_refuses_a_file_that_has_changed(
    path: Path, loaded: dict[str, torch.Tensor], change: object
) -> None:
    assert cumem.plan_sleep().changed_files == ()
    change(path)  # type: ignore[operator]
    before = state()
    plan = cumem.plan_sleep()
    assert plan.changed_files == (str(path),)
    assert f"a file that has changed: {str(path)!r}" in str(plan)
    assert cumem.plan_sleep(offload_tags=[]).changed_files == ()  # the file is not needed
    with pytest.raises(cumem.CheckpointError, match=r"model\.safetensors.*changed"):
        cumem.sleep()
    assert state() == before
    assert intact(loaded)
    cumem.sleep(offload_tags=[])  # another way does without the file
    cumem.wake_up()


@pytest.mark.parametrize("change", CHANGES)
def test_a_wake_refuses_a_file_that_has_changed_and_can_be_repeated(
    driver: DriverUnderTest, path: Path, loaded: dict[str, torch.Tensor], change: object
) -> None:
    original, times = path.read_bytes(), path.stat()
    used = driver.used_bytes()
    cumem.sleep()
    asleep = driver.used_bytes()
    change(path)  # type: ignore[operator]
    before = state()
    with pytest.raises(cumem.CheckpointError, match=r"model\.safetensors.*changed") as caught:
        cumem.wake_up()
    assert "Put the file back as it was loaded" in str(caught.value)
    assert (state(), driver.used_bytes()) == (before, asleep)
    with path.open("r+b") as file:
        file.write(original)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    cumem.wake_up()
    assert driver.used_bytes() == used
    assert intact(loaded)


def test_other_bytes_behind_the_same_identity_are_found_at_wake(
    path: Path, loaded: dict[str, torch.Tensor]
) -> None:
    original, times = path.read_bytes(), path.stat()
    cumem.sleep()
    rewrite(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    before = state()
    with pytest.raises(cumem.CheckpointError, match=r"model\.safetensors.*changed"):
        cumem.wake_up()
    with pytest.raises(cumem.CheckpointError):
        cumem.wake_up(wait=False).wait()
    assert state() == before
    path.write_bytes(original)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    cumem.wake_up()
    assert intact(loaded)


def test_an_asynchronous_wake_reads_the_file(loaded: dict[str, torch.Tensor]) -> None:
    cumem.sleep()
    handle = cumem.wake_up(wait=False)
    handle.wait_for(loaded["last"])
    assert torch.equal(raw(loaded["last"]).cpu(), raw(TENSORS["last"]))
    handle.wait()
    assert intact(loaded)


def test_a_switch_reads_the_file_too(tmp_path: Path, loaded: dict[str, torch.Tensor]) -> None:
    other = {"other": host_tensor(torch.uint8, (3 * MIB,), 8)}
    second = cumem.load_file(
        write_file(tmp_path / "b.safetensors", other), tag="second", on_sleep="reload"
    )
    cumem.sleep(tags=["second"])
    report = cumem.switch(sleep_tags=["weights"], wake_tags=["second"])
    assert report.sleep.reload_bytes == sum(tensor.nbytes for tensor in TENSORS.values())
    assert same_bytes(second["other"], other["other"])
    cumem.switch(sleep_tags=["second"], wake_tags=["weights"])
    assert intact(loaded)
    cumem.wake_up()
    assert same_bytes(second["other"], other["other"])


def test_shards_are_reloaded_each_from_its_own_file(tmp_path: Path) -> None:
    shards = {
        f"{seed}.safetensors": {f"t{seed}": host_tensor(torch.uint8, (MIB + seed,), seed)}
        for seed in range(3)
    }
    tensors = cumem.load_file(write_shards(tmp_path, shards), on_sleep=cumem.OnSleep.RELOAD)
    assert cumem.sleep().copied_bytes == 0
    cumem.wake_up()
    assert all(holds_pattern(tensors[f"t{seed}"], seed) for seed in range(3))


def test_a_discarding_sleep_loses_it_and_a_kept_tensor_stays(
    loaded: dict[str, torch.Tensor],
) -> None:
    cumem.keep(loaded["odd"])
    assert cumem.sleep(level=2).reload_bytes == 0
    cumem.wake_up(fill="zero")
    assert intact(loaded, "odd")
    assert not loaded["last"].any()
    report = cumem.sleep()  # zeros are not what the file holds
    assert report.copied_bytes >= 3 * MIB
    cumem.wake_up()
    assert not loaded["last"].any()
    assert intact(loaded, "odd")


def test_named_for_offload_it_still_comes_from_the_file(loaded: dict[str, torch.Tensor]) -> None:
    report = cumem.sleep(offload_tags=["weights"])
    assert (report.copied_bytes, report.discarded_bytes) == (0, 0)
    cumem.wake_up()
    assert intact(loaded)


def test_a_verified_wake_holds_for_it_too(loaded: dict[str, torch.Tensor]) -> None:
    fill_pattern(loaded["first"], 9)
    cumem.sleep(verify=True)
    cumem.wake_up(verify=True)
    assert holds_pattern(loaded["first"], 9)
    assert intact(loaded, "last")


def test_the_file_is_closed_with_the_last_tensor(path: Path) -> None:
    def is_open() -> bool:
        held = [os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")]
        return str(path) in held

    tensors = cumem.load_file(path, on_sleep="reload")
    assert is_open()
    cumem.sleep()
    assert is_open()
    tensors.clear()
    gc.collect()
    assert not is_open()


# Without digests


def test_without_digests_everything_is_backed_up_and_the_report_says_so(
    loaded: dict[str, torch.Tensor],
) -> None:
    configure(clean_check="never")
    report = cumem.sleep()
    assert (report.clean_check, report.reload_bytes) == ("never", 0)
    assert report.copied_bytes == sum(tensor.nbytes for tensor in TENSORS.values())
    cumem.wake_up()
    assert intact(loaded)


def test_under_declared_only_what_is_named_dirty_is_backed_up(
    loaded: dict[str, torch.Tensor],
) -> None:
    configure(clean_check="declared")
    assert cumem.sleep().copied_bytes == 0
    cumem.wake_up()
    assert intact(loaded)
    fill_pattern(cumem.mark_dirty(loaded["last"]), 5)
    report = cumem.sleep()
    assert loaded["last"].nbytes <= report.copied_bytes <= loaded["last"].nbytes + 2 * PIECE
    cumem.wake_up()
    assert holds_pattern(loaded["last"], 5)
    assert intact(loaded, "first", "odd")


def test_what_is_declared_clean_after_it_was_written_is_not_read_from_the_file(
    loaded: dict[str, torch.Tensor],
) -> None:
    configure(clean_check="declared")
    fill_pattern(cumem.mark_dirty(loaded["last"]), 5)
    cumem.mark_clean(loaded["last"])
    for _ in range(3):
        cumem.sleep()
        cumem.wake_up()
        assert holds_pattern(loaded["last"], 5)
    assert intact(loaded, "first", "odd")


def test_only_loaded_memory_can_be_reloaded() -> None:
    with pytest.raises(ValueError, match="load_file"):
        cumem.use_memory_pool("weights", on_sleep="reload")
    with pytest.raises(ValueError, match="load_file"):
        cumem.graph_pool(on_sleep="reload")


# What the driver refuses


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        *(("cuMemcpyHtoDAsync", nth) for nth in (1, 2, 9)),
        *(("cuEventRecord", nth) for nth in (1, 2, 9)),
        *(("cuEventSynchronize", nth) for nth in (1, 2, 9)),
        *(("cuLaunchKernel", 1), ("cuMemMap", 1)),
    ],
)
@pytest.mark.needs("failures on request")
def test_a_wake_that_is_refused_leaves_it_asleep(
    driver: DriverUnderTest, loaded: dict[str, torch.Tensor], call: str, nth: int
) -> None:
    cumem.sleep()
    before = state()
    driver.emulator.fail(call, nth=nth, code="CUDA_ERROR_UNKNOWN")
    with pytest.raises(cumem.DriverError, match=call):
        cumem.wake_up()
    driver.emulator.clear()
    assert state() == before
    assert driver.used_bytes() == 0
    cumem.check()
    cumem.wake_up()
    assert intact(loaded)


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuCtxSynchronize", "cuEventSynchronize"])
@pytest.mark.needs("failures on request")
def test_a_sleep_that_is_refused_changes_nothing(
    driver: DriverUnderTest, loaded: dict[str, torch.Tensor], call: str
) -> None:
    before = state()
    driver.emulator.fail(call, code="CUDA_ERROR_UNKNOWN")
    with pytest.raises(cumem.DriverError, match=call):
        cumem.sleep()
    assert state() == before
    assert intact(loaded)
    cumem.sleep()
    cumem.wake_up()
    assert intact(loaded)
    assert tag_stats("weights").segments == 1
