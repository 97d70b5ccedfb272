"""GPU memory that can sleep: physical VRAM goes back, pointers and bytes stay."""

from cumem._block_tables import NoBlocksError
from cumem._declared import mark_clean, mark_dirty
from cumem._keep import keep
from cumem._placing import Buffer
from cumem._runtime import configure
from cumem._version import __version__
from cumem.adopting import Adopted, adopt
from cumem.answering import ReportServer, serve_reports
from cumem.buffers import BufferPlan, Buffers
from cumem.errors import (
    AsleepError,
    BusyError,
    CheckpointError,
    CumemError,
    DeviceOutOfMemoryError,
    DriverError,
    HostOutOfMemoryError,
    IntegrityError,
    StorageError,
)
from cumem.files import load_file
from cumem.guarding import guard
from cumem.hooks import HookHandle, SegmentRange, on_after_map, on_after_unmap, on_before_unmap
from cumem.inspection import LiveBlock, covered, is_mapped, tag_of, uncovered
from cumem.loading import Loaded, load_into
from cumem.memory import default_device, release_host_memory, trim
from cumem.model_snapshot import Saved, restore_snapshot, save_snapshot
from cumem.options import CleanCheck, OnSleep, Options
from cumem.paged_kv import PagedKVCache
from cumem.pool import Pool, graph_pool, use_memory_pool
from cumem.preparing import Preparation, prepare
from cumem.reporting import BlockReport, DeviceReport, MemoryReport, TagReport, report
from cumem.reports import SleepPlan, SleepReport, SwitchReport, WakeReport
from cumem.sleep import epoch, is_sleeping, plan_sleep, sleep, sleeping_tags, wake_up
from cumem.stats import DeviceStats, Stats, TagStats, check, stats
from cumem.switching import switch
from cumem.timeline import Mark, TagMark, Timeline
from cumem.waking import WakeHandle, stream_wake

__all__ = [
    "Adopted",
    "AsleepError",
    "BlockReport",
    "Buffer",
    "BufferPlan",
    "Buffers",
    "BusyError",
    "CheckpointError",
    "CleanCheck",
    "CumemError",
    "DeviceOutOfMemoryError",
    "DeviceReport",
    "DeviceStats",
    "DriverError",
    "HookHandle",
    "HostOutOfMemoryError",
    "IntegrityError",
    "LiveBlock",
    "Loaded",
    "Mark",
    "MemoryReport",
    "NoBlocksError",
    "OnSleep",
    "Options",
    "PagedKVCache",
    "Pool",
    "Preparation",
    "ReportServer",
    "Saved",
    "SegmentRange",
    "SleepPlan",
    "SleepReport",
    "Stats",
    "StorageError",
    "SwitchReport",
    "TagMark",
    "TagReport",
    "TagStats",
    "Timeline",
    "WakeHandle",
    "WakeReport",
    "__version__",
    "adopt",
    "check",
    "configure",
    "covered",
    "default_device",
    "epoch",
    "graph_pool",
    "guard",
    "is_mapped",
    "is_sleeping",
    "keep",
    "load_file",
    "load_into",
    "mark_clean",
    "mark_dirty",
    "on_after_map",
    "on_after_unmap",
    "on_before_unmap",
    "plan_sleep",
    "prepare",
    "release_host_memory",
    "report",
    "restore_snapshot",
    "save_snapshot",
    "serve_reports",
    "sleep",
    "sleeping_tags",
    "stats",
    "stream_wake",
    "switch",
    "tag_of",
    "trim",
    "uncovered",
    "use_memory_pool",
    "wake_up",
]
