"""Is wrong input to a model host refused before anything changes?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_host_support import MODEL, Model, states

import cumem
from cumem.serving import ModelHost

WRONG_HOSTS: list[tuple[dict[str, Any], str]] = [
    ({"budget_bytes": "4GiB"}, "budget_bytes must be an int, not '4GiB'"),
    ({"budget_bytes": 4e9}, "budget_bytes must be an int, not 4000000000.0"),
    ({"patience": None}, "patience must be an int, not None"),
    ({"busy_seconds": "1"}, "busy_seconds must be a number of seconds, not '1'"),
    ({"busy_seconds": True}, "busy_seconds must be a number of seconds, not True"),
    ({"device": 1.5}, "device must be a torch.device, str or int"),
]

WRONG_MODELS: list[tuple[dict[str, Any], str]] = [
    ({"name": 7}, "name must be a string, not 7"),
    ({"name": ["b"]}, "name must be a string, not a list"),
    ({"build_fn": "build"}, "build_fn must be a function without arguments, not 'build'"),
    ({"checkpoint": 3}, "checkpoint must be a path or None, not 3"),
    ({"bytes": "2MiB"}, "bytes must be an int, not '2MiB'"),
    ({"priority": "high"}, "priority must be an int, not 'high'"),
    ({"pinned": 1}, "pinned must be True or False, not 1"),
]


def test_bad_input_is_an_error_before_anything_changes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="budget_bytes must be positive"):
        ModelHost(0)
    with pytest.raises(ValueError, match="patience must be positive"):
        ModelHost(1, patience=0)
    with pytest.raises(ValueError, match="no device"):
        ModelHost(1, device=99)
    for options, message in WRONG_HOSTS:
        with pytest.raises(TypeError, match=message):
            ModelHost(**{"budget_bytes": MODEL, **options})
    with pytest.raises(ValueError, match="busy_seconds must be 0 or more"):
        ModelHost(MODEL, busy_seconds=-1)
    host = ModelHost(MODEL)
    host.add("a", lambda: Model(0))
    for options, message in WRONG_MODELS:
        with pytest.raises(TypeError, match=message):
            host.add(**{"name": "b", "build_fn": lambda: Model(0), **options})
    for name in ("", "a", "a/b"):
        with pytest.raises(ValueError, match="a name of its own"):
            host.add(name, lambda: Model(0))
    with pytest.raises(ValueError, match="bytes must be positive"):
        host.add("b", lambda: Model(0), bytes=0)
    with pytest.raises(cumem.CheckpointError):
        host.add("b", lambda: Model(0), tmp_path / "nothing.safetensors")
    assert list(states(host)) == ["a"]
