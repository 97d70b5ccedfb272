"""Does memory come back from its file, and from a backup only what was written since?"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch
from checkpoints import host_tensor, write_file, write_shards
from reload_support import (
    PIECE,
    TENSORS,
    configure,
    digests_are_there,  # noqa: F401 - pytest finds fixtures by name
    intact,
    loaded_fixture,  # noqa: F401 - pytest finds fixtures by name
    path_fixture,  # noqa: F401 - pytest finds fixtures by name
    small_steps,  # noqa: F401 - pytest finds fixtures by name
)
from support import MIB, DriverUnderTest, fill_pattern, holds_pattern, raw, same_bytes

import cumem


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
