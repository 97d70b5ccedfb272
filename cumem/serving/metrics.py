"""What does Prometheus get to see of an engine?

Gauges are read when they are asked for; counters and histograms follow the transitions.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import cumem
from cumem.reports import SleepReport, WakeReport
from cumem.serving.controller import SleepController
from cumem.serving.states import Kind, State, Transition

# From the milliseconds of a discarded cache to the minute of a cold disk.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

_TAG_GAUGES = {
    "segment_bytes": "Bytes of the tag's segments, mapped or asleep.",
    "mapped_bytes": "Device memory that the tag holds.",
    "asleep_bytes": "Bytes of the tag that are asleep.",
    "live_bytes": "Bytes of the tag in live blocks.",
    "backup_bytes": "Bytes of the tag that are backed up.",
}


class Metrics:
    """The metrics of one controller, in a registry of their own."""

    def __init__(self, controller: SleepController) -> None:
        registry = self._registry = CollectorRegistry()
        registry.register(_Now(controller))
        self._seconds = {
            Kind.SLEEP: _seconds("cumem_sleep_seconds", "putting memory to sleep", registry),
            Kind.WAKE_UP: _seconds("cumem_wake_seconds", "waking memory", registry),
        }
        self._drain = _seconds("cumem_drain_seconds", "waiting for requests to end", registry)
        self._bytes = {
            name: Counter(f"cumem_{name}_bytes", text, registry=registry)
            for name, text in _MOVED.items()
        }
        self._failures = Counter(
            "cumem_transition_failures",
            "Transitions that failed, by kind of failure.",
            ["transition", "kind"],
            registry=registry,
        )
        controller.observe(self.add)

    def add(self, transition: Transition) -> None:
        """Counts a transition that is over."""
        if transition.error is not None:
            self._failures.labels(transition.kind.value, transition.error).inc()
            return
        self._seconds[transition.kind].observe(transition.seconds)
        report = transition.report
        if isinstance(report, SleepReport):
            self._drain.observe(transition.drain_seconds)
            self._bytes["freed"].inc(report.freed_bytes)
            self._bytes["copied"].inc(report.copied_bytes)
            self._bytes["skipped"].inc(report.skipped_bytes)
            self._bytes["discarded"].inc(report.discarded_bytes)
        elif isinstance(report, WakeReport):
            self._bytes["mapped_at_wake"].inc(report.mapped_bytes)
            self._bytes["restored"].inc(report.restored_bytes)

    def text(self) -> bytes:
        """Prometheus' text format. Asks the driver: not for the event loop."""
        return generate_latest(self._registry)


_MOVED = {
    "freed": "Device memory given back by sleeps.",
    "copied": "Bytes that sleeps copied to backups.",
    "skipped": "Bytes that sleeps did not copy, because they had not changed.",
    "discarded": "Live bytes that sleeps discarded.",
    "mapped_at_wake": "Device memory taken by wakes.",
    "restored": "Bytes that wakes brought back from backups.",
}


class _Now(Collector):
    """What is true at this moment."""

    def __init__(self, controller: SleepController) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield _states(self._controller.state)
        yield from _memory(self._controller)

    def _requests(self) -> Iterator[Metric]:
        controller = self._controller
        gauges = (
            ("in_flight", "Requests that run.", controller.in_flight),
            ("waiting", "Requests that wait for a wake or their turn.", controller.waiting),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"cumem_requests_{name}", text, value=value)
        text = "Requests refused: not all memory was awake, or too many waited."
        yield CounterMetricFamily("cumem_requests_refused", text, value=controller.refused)


def _states(now: State) -> Metric:
    family = GaugeMetricFamily("cumem_state", "1 for the engine's state.", labels=["state"])
    for state in State:
        family.add_metric([state.value], float(state is now))
    return family


def _memory(controller: SleepController) -> Iterator[Metric]:
    stats, asleep = cumem.stats(), controller.sleeping_tags
    own = [tag for tag in stats.tags if tag.tag in controller.tags]
    sleeping = GaugeMetricFamily("cumem_tag_asleep", "1 where some of it sleeps.", labels=["tag"])
    for tag in own:
        sleeping.add_metric([tag.tag], float(tag.tag in asleep))
    yield sleeping
    for name, text in _TAG_GAUGES.items():
        family = GaugeMetricFamily(f"cumem_tag_{name}", text, labels=["tag"])
        for tag in own:
            family.add_metric([tag.tag], getattr(tag, name))
        yield family
    held = "Host memory held for backups."
    yield GaugeMetricFamily("cumem_host_bytes", held, value=stats.host_bytes)
    for name, text in (("used", "in use by everybody"), ("total", "there")):
        family = GaugeMetricFamily(
            f"cumem_device_{name}_bytes", f"Device memory {text}.", labels=["device"]
        )
        for device in stats.devices:
            family.add_metric([device.device], getattr(device, f"{name}_bytes"))
        yield family


def _seconds(name: str, what: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, f"Seconds of {what}.", buckets=_BUCKETS, registry=registry)
