"""Are wrong arguments refused before anything is changed?"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from serving_support import Engine, run, until
from support import MIB, make

import cumem
from cumem.serving import ServingOptions, SleepController, State


def pool_of(tag: str) -> torch.Tensor:
    with cumem.use_memory_pool(tag):
        return make(MIB)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"level": 3}, ValueError, "unknown level 3"),
        ({"mode": "now"}, ValueError, "unknown mode 'now'; choices: 'abort', 'wait'"),
        ({"mode": 1}, TypeError, "mode must be a string"),
        ({"tags": ["wieghts"]}, ValueError, "unknown tag 'wieghts'; known tags: .*'kv_cache'"),
        ({"tags": "weights"}, TypeError, "not one string"),
        ({"tags": 5}, TypeError, "tags must be a list of strings or None, not 5"),
        ({"timeout": 0}, ValueError, "timeout must be positive"),
        ({"timeout": True}, TypeError, "timeout must be a number"),
    ],
)
def test_wrong_arguments_change_nothing(call: Any, error: type[Exception], message: str) -> None:
    async def test(engine: Engine) -> None:
        with pytest.raises(error, match=message):
            await engine.controller.sleep(**call)
        assert engine.controller.state is State.AWAKE
        assert engine.controller.history == ()

    run(test)


UNKNOWN = r"unknown tag 'wieghts' .*known tags: .*'weights'"


def test_an_unknown_tag_is_refused_with_the_choices() -> None:
    kept = pool_of("weights")
    with pytest.raises(ValueError, match=UNKNOWN):
        SleepController(tags=["weights", "wieghts"])
    del kept


@pytest.mark.needs("fresh process for each test")
def test_without_pools_an_unknown_tag_is_refused_at_the_first_call() -> None:
    """The engine may still be built when the controller is made."""

    async def use(controller: SleepController) -> None:
        for call in (controller.sleep, controller.wake_up):
            with pytest.raises(ValueError, match=UNKNOWN):
                await call()
        assert controller.history == ()

    controller = SleepController(tags=["weights", "wieghts"])
    kept = pool_of("weights")
    asyncio.run(use(controller))
    assert not cumem.is_sleeping()
    del kept


def test_a_controller_may_be_older_than_its_pools() -> None:
    async def use(controller: SleepController) -> None:
        async with controller:
            assert (await controller.sleep()).tags == {"weights"}
            await controller.wake_up()

    controller = SleepController(tags=["weights"])
    kept = pool_of("weights")
    asyncio.run(use(controller))
    del kept


@pytest.mark.needs("fresh process for each test")
def test_an_idle_sleep_of_an_unknown_tag_is_in_the_history() -> None:
    async def use(controller: SleepController) -> None:
        async with controller:
            await until(lambda: bool(controller.history))
        assert controller.history[0].error == "ValueError"
        assert "unknown tag 'wieghts'" in controller.history[0].message
        assert not cumem.is_sleeping()

    options = ServingOptions(idle_seconds=0.01)
    controller = SleepController(tags=["weights", "wieghts"], options=options)
    kept = pool_of("weights")
    asyncio.run(use(controller))
    del kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tags": "weights"}, "tags must be a list of strings, not one string"),
        ({"tags": 5}, "tags must be a list of strings or None, not 5"),
        ({"tags": [5]}, "a tag must be a string, not int"),
        ({"modules": torch.nn.Linear(1, 1)}, r"not a Linear; for one alone give \[module\]"),
        ({"modules": torch.nn.Sequential(torch.nn.ReLU())}, "not a Sequential; for one alone"),
        ({"modules": {"model": torch.nn.ReLU()}}, "a list of torch modules; 'model' is in it"),
        ({"modules": None}, "modules must be a list of torch modules, not None"),
        ({"options": {"auto_wake": True}}, "options must be ServingOptions or None, not a dict"),
    ],
)
def test_a_controller_of_wrong_types_is_refused(options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        SleepController(**options)


def test_a_module_is_not_guarded_where_another_is_none() -> None:
    module = torch.nn.ReLU()
    with pytest.raises(TypeError, match="None is in it"):
        SleepController(modules=[module, None])  # type: ignore[list-item]
    assert not module._forward_pre_hooks


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"idle_seconds": -1}, ValueError),
        ({"drain_seconds": float("inf")}, ValueError),
        ({"idle_level": 0}, ValueError),
        ({"history": 0}, ValueError),
        ({"most_in_flight": 0}, ValueError),
        ({"most_waiting": 0}, ValueError),
        ({"most_waiting": True}, TypeError),
        ({"auto_wake": 1}, TypeError),
        ({"history": 1.5}, TypeError),
    ],
)
def test_wrong_options_are_refused(options: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        ServingOptions(**options)
