"""Does the router say what was done, and why not, with the right status?"""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest
from serving_http import Client, over_http
from serving_support import Engine, Gate, Held, run

import cumem
from cumem.testing import EmulatedDriver

parser = pytest.importorskip("prometheus_client.parser", reason="needs the serve extra")

TAGS = ["kv_cache", "weights"]


def sizes(text: str) -> dict[str, float]:
    """Prometheus' text as its own parser reads it: name and labels to value."""
    return {
        f"{sample.name}{json.dumps(sample.labels, sort_keys=True)}": sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_sleep_and_wake_say_what_was_done() -> None:
    async def test(client: Client) -> None:
        assert (await client.get("/is_sleeping")).json() == {
            "is_sleeping": False,
            "tags": [],
            "state": "awake",
        }
        slept = await client.post("/sleep", params={"level": 1, "mode": "wait"})
        assert slept.status_code == 200
        body = slept.json()
        assert body["did"].startswith("slept kv_cache, weights: freed ")
        assert body["report"]["tags"] == body["tags"] == TAGS
        assert body["report"]["freed_bytes"] > 0
        assert (body["is_sleeping"], body["state"]) == (True, "asleep")
        part = (await client.post("/wake_up?tags=weights")).json()
        assert (part["report"]["tags"], part["tags"]) == (["weights"], ["kv_cache"])
        assert (part["is_sleeping"], part["state"]) == (True, "partly_awake")
        rest = (await client.post("/wake_up?tags=weights&tags=kv_cache")).json()
        assert rest["did"].startswith("woke kv_cache: mapped ")
        assert rest["is_sleeping"] is False
        assert await client.engine.serve()

    over_http(test)


def test_the_names_of_sglang_take_tags_as_json() -> None:
    async def test(client: Client) -> None:
        released = await client.post("/release_memory_occupation", json={"tags": ["kv_cache"]})
        assert released.json()["tags"] == ["kv_cache"]
        assert (await client.post("/release_memory_occupation")).json()["tags"] == TAGS
        resumed = await client.post("/resume_memory_occupation", json={"tags": ["weights"]})
        assert resumed.json()["tags"] == ["kv_cache"]
        resumed = await client.post("/resume_memory_occupation", json={"tags": None})
        assert resumed.json()["is_sleeping"] is False

    over_http(test)


def test_another_transition_under_way_is_409() -> None:
    async def test(client: Client) -> None:
        gate = Gate()
        client.engine.controller.before("sleep", gate.hook)
        sleep = asyncio.create_task(client.post("/sleep"))
        await gate.reached.wait()
        answer = await client.post("/wake_up")
        assert (answer.status_code, answer.json()["kind"]) == (409, "BusyError")
        gate.opened.set()
        assert (await sleep).status_code == 200

    over_http(test)


def test_requests_that_do_not_end_are_409_and_abort_ends_them() -> None:
    async def test(client: Client) -> None:
        held = await Held(client.engine.controller).started()
        answer = await client.post("/sleep?timeout=0.05")
        assert (answer.status_code, answer.json()["kind"]) == (409, "TransitionTimeoutError")
        assert answer.json()["state"] == "awake"
        assert (await client.post("/sleep?mode=abort")).status_code == 200
        await asyncio.wait([held.task])
        assert held.task.exception() is not None

    over_http(test)


@pytest.mark.needs("a capture that can be begun")
def test_a_capture_under_way_is_409(emulator: EmulatedDriver) -> None:
    async def test(client: Client) -> None:
        emulator.begin_capture()
        answer = await client.post("/sleep")
        emulator.end_capture()
        assert (answer.status_code, answer.json()["kind"]) == (409, "BusyError")
        assert "capture" in answer.json()["error"]
        assert (await client.post("/sleep")).status_code == 200

    over_http(test)


@pytest.mark.needs("failures")
def test_no_device_memory_is_507_and_nothing_is_lost(emulator: EmulatedDriver) -> None:
    async def test(client: Client) -> None:
        await client.post("/sleep")
        emulator.fail("cuMemCreate")
        emulator.fail("cuMemCreate", nth=2)
        answer = await client.post("/wake_up")
        assert (answer.status_code, answer.json()["kind"]) == (507, "DeviceOutOfMemoryError")
        assert answer.json()["tags"] == TAGS
        assert (await client.post("/wake_up")).status_code == 200
        assert client.engine.intact()

    over_http(test)


def test_no_host_memory_is_507_and_nothing_is_lost() -> None:
    async def test(client: Client) -> None:
        cumem.configure(cumem.Options(host_limit_bytes=1))
        answer = await client.post("/sleep")
        assert (answer.status_code, answer.json()["kind"]) == (507, "HostOutOfMemoryError")
        assert answer.json()["is_sleeping"] is False
        assert await client.engine.serve()

    over_http(test)


@pytest.mark.parametrize("lower", [False, True])
def test_a_hook_that_raised_is_named_with_its_failure(
    lower: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_segments: object) -> None:
        raise OSError("the card is gone")

    async def test(client: Client) -> None:
        before = partial(client.engine.controller.before, "sleep")
        registered = (cumem.on_before_unmap if lower else before)(refuse)
        answer = await client.post("/sleep")
        registered.remove()
        assert (answer.status_code, answer.json()["is_sleeping"]) == (500, False)
        assert "refuse" in answer.json()["error"]
        assert "raised OSError: the card is gone. " in answer.json()["error"]
        assert "Traceback" not in answer.text
        assert 'raise OSError("the card is gone")' in caplog.text

    over_http(test)


@pytest.mark.needs("failures")
def test_a_driver_that_refuses_is_500_with_the_reason(emulator: EmulatedDriver) -> None:
    async def test(client: Client) -> None:
        emulator.fail("cuMemcpyDtoHAsync", code="CUDA_ERROR_UNKNOWN")
        answer = await client.post("/sleep")
        assert (answer.status_code, answer.json()["kind"]) == (500, "DriverError")

    over_http(test)


def test_no_get_changes_memory() -> None:
    async def test(client: Client) -> None:
        posts = ("/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation")
        for path in posts:
            assert (await client.get(path)).status_code == 405
        before = cumem.stats()
        for path in ("/is_sleeping", "/memory", "/metrics", "/transitions"):
            assert (await client.get(path)).status_code == 200
        assert cumem.stats() == before

    over_http(test)


def test_memory_is_the_report_as_json() -> None:
    async def test(client: Client) -> None:
        await client.post("/sleep?tags=kv_cache")
        body = (await client.get("/memory")).json()
        tags = {tag["tag"]: tag for tag in body["tags"]}
        assert tags["kv_cache"]["asleep_bytes"] == tags["kv_cache"]["segment_bytes"] > 0
        assert tags["weights"]["mapped_bytes"] == tags["weights"]["segment_bytes"] > 0
        assert body["host_bytes"] == cumem.stats().host_bytes
        assert body["sleeping"] == {
            "is_sleeping": True,
            "tags": ["kv_cache"],
            "state": "asleep",
        }
        (transition,) = (await client.get("/transitions")).json()["transitions"]
        assert (transition["kind"], transition["asleep"]) == ("sleep", ["kv_cache"])

    over_http(test)


def test_metrics_follow_what_happened() -> None:
    async def test(client: Client) -> None:
        client.engine.controller.before("wake_up", lambda: 1 // 0)
        await client.post("/sleep")
        assert (await client.post("/wake_up")).status_code == 500
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        found = sizes(answer.text)
        stats = {tag.tag: tag for tag in cumem.stats().tags}
        assert found['cumem_tag_asleep{"tag": "weights"}'] == 1
        assert found['cumem_tag_mapped_bytes{"tag": "weights"}'] == 0
        asleep = found['cumem_tag_asleep_bytes{"tag": "weights"}']
        assert asleep == stats["weights"].asleep_bytes > 0
        backup = found['cumem_tag_backup_bytes{"tag": "weights"}']
        assert backup == stats["weights"].backup_bytes > 0
        slept = client.engine.controller.history[0].report
        assert isinstance(slept, cumem.SleepReport)
        assert found["cumem_copied_bytes_total{}"] == slept.copied_bytes > 0
        assert found["cumem_skipped_bytes_total{}"] == slept.skipped_bytes == 0
        assert found["cumem_sleep_seconds_count{}"] == 1
        assert found["cumem_wake_seconds_count{}"] == 0
        failures = 'cumem_transition_failures_total{"kind": "CumemError", "transition": "wake_up"}'
        assert found[failures] == 1
        assert found['cumem_state{"state": "asleep"}'] == 1
        assert found['cumem_state{"state": "awake"}'] == 0

    over_http(test)


def test_who_comes_while_it_sleeps_is_told_when_to_try_again() -> None:
    from cumem.serving.answers import refused

    async def test(engine: Engine) -> None:
        await engine.controller.sleep()
        try:
            await engine.serve()
        except cumem.CumemError as error:
            answer = refused(engine.controller, error)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert json.loads(answer.body)["tags"] == TAGS

    run(test)
