"""Does memory sleep to disk, privately, and is nothing lost when the disk refuses?"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import (
    MIB,
    DriverUnderTest,
    fill_pattern,
    holds_pattern,
    make,
    run_fresh,
    state,
    tag_stats,
)

import cumem

KIB = 1 << 10


def configure(folder: Path | None, **settings: object) -> None:
    cumem.configure(
        cumem.Options(
            disk_dir=None if folder is None else str(folder),
            load_buffer_bytes=256 * KIB,
            load_ring_bytes=MIB,
            load_threads=2,
            **settings,  # type: ignore[arg-type]
        )
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    configure(tmp_path)
    return tmp_path


@pytest.fixture
def tensors(folder: Path) -> Iterator[list[torch.Tensor]]:
    with cumem.use_memory_pool("weights", on_sleep="disk"):
        made = [make(5000, 0), make(11 * MIB + 3, 1), make(3 * MIB, 2)]
    yield made
    made.clear()


def intact(tensors: list[torch.Tensor]) -> bool:
    return all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors))


def open_files(folder: Path) -> list[str]:
    """Descriptors of this process on files in the folder, whether they have a name or not."""
    found = [entry.path for entry in os.scandir("/proc/self/fd")]
    return [path for path in found if os.path.realpath(path).startswith(str(folder))]


def test_contents_come_back_from_disk(
    driver: DriverUnderTest, folder: Path, tensors: list[torch.Tensor]
) -> None:
    places = [tensor.data_ptr() for tensor in tensors]
    live = tag_stats("weights").live_bytes
    report = cumem.sleep()
    assert report.copied_bytes == report.offloaded_bytes == live
    assert live <= report.disk_bytes < live + 3 * 4096
    assert cumem.stats().host_used_bytes == 0
    assert cumem.stats().host_bytes <= MIB
    assert "disk" in str(report)
    cumem.check()
    report = cumem.wake_up()
    assert report.restored_bytes == live
    assert [tensor.data_ptr() for tensor in tensors] == places
    assert intact(tensors)


def test_the_file_has_no_name_and_is_its_owners_alone(
    folder: Path, tensors: list[torch.Tensor]
) -> None:
    cumem.sleep()
    assert list(folder.iterdir()) == []
    (found,) = open_files(folder)
    status = os.stat(found)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    cumem.wake_up()
    assert intact(tensors)


def test_a_second_sleep_writes_only_what_has_changed(tensors: list[torch.Tensor]) -> None:
    cumem.sleep()
    cumem.wake_up()
    fill_pattern(tensors[2], 9)
    report = cumem.sleep()
    if report.clean_check == "digest":
        assert 3 * MIB <= report.copied_bytes <= 3 * MIB + 4 * MIB
    cumem.wake_up()
    assert holds_pattern(tensors[2], 9)
    assert intact(tensors[:2])


def test_nothing_is_kept_on_disk_where_backups_are_not_retained(
    folder: Path, tensors: list[torch.Tensor]
) -> None:
    configure(folder, retain_backup=False)
    cumem.sleep()
    assert open_files(folder)
    cumem.wake_up()
    assert not open_files(folder)
    assert intact(tensors)


def test_room_on_disk_goes_with_what_held_it(folder: Path, tensors: list[torch.Tensor]) -> None:
    cumem.sleep()
    (found,) = open_files(folder)
    before = os.stat(found).st_blocks
    del tensors[1]
    cumem.wake_up()
    cumem.trim()
    assert os.stat(found).st_blocks < before
    assert holds_pattern(tensors[1], 2)


def test_it_is_verified_like_any_backup(folder: Path, tensors: list[torch.Tensor]) -> None:
    cumem.sleep(verify=True)
    cumem.wake_up(verify=True)
    assert intact(tensors)
    cumem.sleep()
    (found,) = open_files(folder)
    with open(found, "r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    with pytest.raises(cumem.IntegrityError):
        cumem.wake_up(verify=True)
    cumem.wake_up()


def test_a_switch_goes_through_the_disk(folder: Path, tensors: list[torch.Tensor]) -> None:
    with cumem.use_memory_pool("other", on_sleep="disk"):
        other = make(4 * MIB, 7)
    cumem.sleep(tags=["other"])
    report = cumem.switch(sleep_tags=["weights"], wake_tags=["other"])
    assert report.sleep.disk_bytes > 0
    assert holds_pattern(other, 7)
    cumem.switch(sleep_tags=["other"], wake_tags=["weights"])
    assert intact(tensors)
    cumem.wake_up()
    assert holds_pattern(other, 7)


def test_an_asynchronous_wake_reads_the_disk(tensors: list[torch.Tensor]) -> None:
    cumem.sleep()
    cumem.wake_up(wait=False).wait()
    assert intact(tensors)


def test_named_for_offload_it_still_goes_to_disk(tensors: list[torch.Tensor]) -> None:
    assert cumem.sleep(offload_tags=["weights"]).disk_bytes > 0
    cumem.wake_up()
    assert intact(tensors)


def test_a_plan_takes_no_host_memory(tensors: list[torch.Tensor]) -> None:
    plan = cumem.plan_sleep()
    assert (plan.host_bytes, plan.offloaded_bytes) == (0, tag_stats("weights").live_bytes)


# Refusals


def test_without_a_folder_it_is_refused_first() -> None:
    configure(None)
    with pytest.raises(ValueError, match="disk_dir"):
        cumem.use_memory_pool("weights", on_sleep="disk")


def test_a_folder_that_is_missing_is_told_before_anything_is_allocated(folder: Path) -> None:
    for wrong in (folder / "missing", Path(__file__)):
        configure(wrong)
        with pytest.raises(ValueError, match=rf"needs a folder, and disk_dir '{wrong}' is none"):
            cumem.use_memory_pool("weights", on_sleep="disk")


def test_a_folder_taken_away_is_refused_first(tensors: list[torch.Tensor], folder: Path) -> None:
    configure(None)
    before = state()
    with pytest.raises(ValueError, match="disk_dir"):
        cumem.sleep()
    assert state() == before
    assert intact(tensors)


def test_a_folder_that_is_missing_changes_nothing(
    tensors: list[torch.Tensor], folder: Path
) -> None:
    configure(folder / "missing")
    before = state()
    with pytest.raises(cumem.StorageError, match=r"missing.*No such file") as caught:
        cumem.sleep()
    assert caught.value.errno == errno.ENOENT
    assert isinstance(caught.value, OSError)
    assert state() == before
    assert intact(tensors)
    configure(folder)
    cumem.sleep()
    cumem.wake_up()
    assert intact(tensors)


def test_a_full_disk_changes_nothing(tensors: list[torch.Tensor]) -> None:
    # No file system is this small, but the kernel's limit refuses in the same place.
    import resource
    import signal

    before = state()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        with pytest.raises(cumem.StorageError, match=r"fallocate.*MiB were wanted") as caught:
            cumem.sleep()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG
    assert state() == before
    assert intact(tensors)


def test_a_disk_that_cannot_be_read_loses_nothing(
    driver: DriverUnderTest, folder: Path, tensors: list[torch.Tensor]
) -> None:
    cumem.sleep()
    (found,) = open_files(folder)
    with open(found, "r+b") as file:
        whole = file.read()
        file.truncate(MIB)
    before, used = state(), driver.used_bytes()
    with pytest.raises(cumem.StorageError, match=r"cut short.*call wake_up again"):
        cumem.wake_up()
    assert (state(), driver.used_bytes()) == (before, used)
    with open(found, "r+b") as file:
        file.write(whole)
    cumem.wake_up()
    assert intact(tensors)


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuEventRecord", "cuEventSynchronize"])
@pytest.mark.needs("failures on request")
def test_a_sleep_that_the_driver_refuses_changes_nothing(
    driver: DriverUnderTest, tensors: list[torch.Tensor], folder: Path, call: str, nth: int
) -> None:
    before = state()
    cumem.configure(
        cumem.Options(
            disk_dir=str(folder),
            load_buffer_bytes=256 * KIB,
            load_ring_bytes=MIB,
            load_threads=2,
            clean_check="never",
        )
    )
    driver.emulator.fail(call, nth=nth, code="CUDA_ERROR_UNKNOWN")
    with pytest.raises(cumem.DriverError, match=call):
        cumem.sleep()
    driver.emulator.clear()
    assert state() == before
    assert open_files(folder) == []
    assert intact(tensors)
    cumem.sleep()
    cumem.wake_up()
    assert intact(tensors)


def test_nothing_is_left_when_the_process_ends(tmp_path: Path) -> None:
    run_fresh(
        f"""
import torch, cumem
cumem.configure(cumem.Options(disk_dir={str(tmp_path)!r}))
with cumem.use_memory_pool("weights", on_sleep="disk"):
    tensor = torch.arange(100_000)
cumem.sleep()
"""
    )
    assert list(tmp_path.iterdir()) == []


def test_kept_backups_make_room_for_what_files_pass_through(
    tensors: list[torch.Tensor], folder: Path
) -> None:
    def fill_host() -> None:
        cumem.sleep(tags=["draft"])
        cumem.wake_up(["draft"])
        assert cumem.stats().host_bytes == 20 * MIB  # the limit, and none of it is needed

    save_file({"a": tensors[0].clone()}, folder / "model.safetensors")
    with cumem.use_memory_pool("draft"):
        other = make(20 * MIB, 3)
    configure(folder, host_limit_bytes=20 * MIB)
    fill_host()
    cumem.sleep(tags=["weights"])
    fill_host()
    cumem.wake_up(["weights"])
    fill_host()
    loaded = cumem.load_file(folder / "model.safetensors")
    assert intact([loaded["a"]])
    assert intact(tensors)
    loaded.clear()  # it would have a backup in host memory
    cumem.sleep(tags=["weights"])
    fill_host()
    cumem.wake_up(["weights"], wait=False).wait()
    assert intact(tensors)
    cumem.sleep(tags=["weights"])
    fill_host()
    with cumem.use_memory_pool("third", on_sleep="discard"):
        leaving = make(2 * MIB, 4)
    cumem.switch(sleep_tags=["third"], wake_tags=["weights"])
    assert intact(tensors)
    del leaving
    assert holds_pattern(other, 3)
