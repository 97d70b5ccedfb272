"""Does serving stay above the library, and are its web libraries only where HTTP is?

Needs neither compiler nor GPU nor any of these libraries.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "cumem"
PYTHON = sorted(PACKAGE.rglob("*.py"))
WEB = {"starlette", "uvicorn", "prometheus_client", "anyio", "fastapi", "httpx"}
HTTP = {
    *("answers.py", "generating.py", "local.py", "metrics.py", "requesting.py", "routing.py"),
    "server.py",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def web_of(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)} & WEB


def test_there_is_something_to_look_at() -> None:
    http = [path for path in PYTHON if path.parent.name == "serving" and path.name in HTTP]
    assert {path.name for path in http} == HTTP
    assert all(web_of(path) for path in http)


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_only_the_http_side_of_serving_imports_a_web_library(path: Path) -> None:
    assert not web_of(path) or (path.parent.name == "serving" and path.name in HTTP)


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_nothing_below_serving_knows_of_it(path: Path) -> None:
    above = path.parent.name in ("serving", "compat") or path.name == "__main__.py"
    assert above or not [name for name in imported(path) if name.startswith("cumem.serving")]
