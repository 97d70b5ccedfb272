"""Are wrong arguments refused before anything is changed?"""

from __future__ import annotations

from typing import Any

import pytest
from serving_support import Engine, run

from cumem.serving import ServingOptions, State


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"level": 3}, ValueError, "unknown level 3"),
        ({"mode": "now"}, ValueError, "unknown mode 'now'; choices: 'abort', 'wait'"),
        ({"mode": 1}, TypeError, "mode must be a string"),
        ({"tags": ["wieghts"]}, ValueError, "unknown tag 'wieghts'; known tags: .*'kv_cache'"),
        ({"tags": "weights"}, TypeError, "not one string"),
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


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"idle_seconds": -1}, ValueError),
        ({"drain_seconds": float("inf")}, ValueError),
        ({"idle_level": 0}, ValueError),
        ({"history": 0}, ValueError),
        ({"auto_wake": 1}, TypeError),
        ({"history": 1.5}, TypeError),
    ],
)
def test_wrong_options_are_refused(options: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        ServingOptions(**options)
