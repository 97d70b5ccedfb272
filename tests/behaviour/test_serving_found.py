"""Do faults of the controller that were found by trial stay away?"""

from __future__ import annotations

import asyncio
import concurrent.futures

import pytest
from serving_support import Engine, run

import cumem
from cumem.serving import RequestAbortedError, State

UNCARRIED: tuple[type[BaseException], ...] = (
    StopIteration,
    asyncio.CancelledError,
    concurrent.futures.CancelledError,
    SystemExit,
    KeyboardInterrupt,
)


def test_work_that_raises_what_no_future_can_carry_ends_its_own_request_only() -> None:
    async def test(engine: Engine) -> None:
        for error in UNCARRIED:

            def work(error: type[BaseException] = error) -> None:
                raise error

            async with engine.controller.request() as request:
                with pytest.raises(RuntimeError, match=f"raised {error.__name__}"):
                    await request.run(work)
        assert engine.controller.in_flight == 0
        await engine.controller.sleep(timeout=5)

    run(test)


def test_an_abort_reaches_a_request_that_was_only_just_admitted() -> None:
    async def test(engine: Engine) -> None:
        await engine.controller.sleep()
        ended: list[str] = []

        async def request() -> None:
            try:
                async with engine.controller.request():
                    await asyncio.sleep(5)
            except RequestAbortedError:
                ended.append("aborted")

        task = asyncio.create_task(request())
        while engine.controller.state is not State.AWAKE:
            await asyncio.sleep(0)
        await engine.controller.sleep(mode="abort")
        await task
        assert ended == ["aborted"]

    run(test, auto_wake=True)


def test_a_staged_wake_that_woke_everything_is_over() -> None:
    async def test(engine: Engine) -> None:
        await engine.controller.sleep(tags=["kv_cache"])
        await engine.controller.wake_up(["kv_cache"])
        cumem.sleep()  # somebody else
        assert engine.controller.state is State.ASLEEP
        assert await engine.serve()

    run(test, auto_wake=True)
