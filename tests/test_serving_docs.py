"""Do the texts for people who serve say what is true? Their code is run as it stands."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import run_fresh

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "serving.md").read_text()

needs_serve = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("starlette", "httpx", "uvicorn")),
    reason="needs Starlette and uvicorn, of the serve extra, and httpx, of the test extra",
)

# An application, an address of its own for the model's work, and what that answers.
DRIVE = """
import asyncio, httpx

async def drive(app, path, body, expected):
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url='http://test') as client:
        first = await client.post(path, json=body)
        assert first.status_code == 200, first.text
        slept = await client.post('/engine/sleep')
        assert (slept.status_code, slept.json()['tags']) == (200, ['weights']), slept.text
        again = await client.post(path, json=body)
        assert again.status_code == expected, again.text
        woken = await client.post('/engine/wake_up')
        assert (woken.status_code, woken.json()['is_sleeping']) == (200, False), woken.text
        assert (await client.post(path, json=body)).json() == first.json()

async def whole(app, *words):
    async with app.router.lifespan_context(app):
        await drive(app, *words)
"""


@needs_serve
def test_the_guide_mounts_the_router() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    run_fresh(f"{code}\n{DRIVE}\nasyncio.run(whole(app, '/infer', None, 200))\n")  # it wakes itself


@needs_serve
@pytest.mark.skipif(importlib.util.find_spec("fastapi") is None, reason="needs FastAPI")
def test_the_fastapi_example_works() -> None:
    path = str(ROOT / "examples" / "serve_fastapi.py")
    run_fresh(
        f"import runpy\napp = runpy.run_path({path!r})['app']\n{DRIVE}\n"
        "asyncio.run(whole(app, '/double', 21, 503))\n"
    )


@needs_serve
def test_the_guide_names_every_metric_as_it_is() -> None:
    run_fresh(
        "import cumem, re\n"
        "from cumem.serving import SleepController\n"
        "from cumem.serving.metrics import Metrics\n"
        "text = Metrics(SleepController()).text().decode()\n"
        f"named = set(re.findall(r'cumem_[a-z_]+[a-z]', {GUIDE!r}))\n"
        "named = {re.sub('_bucket$', '', name) for name in named}\n"
        "missing = [name for name in sorted(named) if '# TYPE ' + name not in text]\n"
        "assert len(named) > 10 and not missing, missing\n"
    )


@needs_serve
def test_the_guide_names_every_option_of_the_server() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cumem", "serve", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    named = set(re.findall(r"(?<=`)--[a-z-]{3,}", GUIDE))
    assert len(named) >= 4
    assert named <= set(re.findall(r"--[a-z-]+", done.stdout))
