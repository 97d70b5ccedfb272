"""How does a serving application get sleep and wake over HTTP?

    pip install -e '.[serve]' fastapi
    python examples/serve_fastapi.py              # then, in another shell:
    curl http://127.0.0.1:8000/double --json 21
    curl -X POST http://127.0.0.1:8000/engine/sleep
    curl -X POST http://127.0.0.1:8000/engine/wake_up?tags=weights

Without a GPU: CUMEM_DRIVER=emulated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
import uvicorn
from fastapi import Body, FastAPI, HTTPException

import cumem
from cumem.serving import NotServingError, ServingOptions, SleepController, router

# Your engine: what it allocates in these scopes sleeps.
device = cumem.default_device()
with cumem.use_memory_pool("weights"):
    model = torch.nn.Linear(1, 1, bias=False, device=device)
    torch.nn.init.constant_(model.weight, 2.0)

controller = SleepController(
    modules=[model],
    options=ServingOptions(auto_wake=False, idle_seconds=600),
)


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    async with controller:  # counts idle time; at the end, waits for a transition
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/engine", router(controller))  # router(controller, token=...) where others can reach it


@app.post("/double")
async def double(number: float = Body()) -> float:
    """Runs the model; 503 while its memory is asleep."""
    try:
        async with controller.request() as request:
            return await request.run(_run, number)  # in a thread: the loop stays free
    except NotServingError as error:
        retry = {"Retry-After": str(round(error.retry_after) or 1)}
        raise HTTPException(503, str(error), retry) from error


@torch.inference_mode()
def _run(number: float) -> float:
    return float(model(torch.tensor([number], device=device)))


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=8000)
