"""Which driver do the behaviour tests run on? ``--driver`` or CUMEM_TEST_DRIVER says."""

from __future__ import annotations

import os

import pytest
import torch
from support import BODY_PASSED, DRIVERS, chosen_driver


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--driver",
        choices=DRIVERS,
        default=os.environ.get("CUMEM_TEST_DRIVER"),
        help="driver of the behaviour tests (default: cuda where torch sees a GPU, else emulated)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "needs(capability): the emulated driver has it, the real one does not"
    )
    config.addinivalue_line("markers", "machine(capacity_bytes=, devices=): the emulated machine")


def pytest_report_header(config: pytest.Config) -> str:
    reason = "as asked" if config.getoption("--driver") else _reason()
    return f"behaviour tests on the {chosen_driver(config)} driver ({reason})"


def _reason() -> str:
    return "torch sees a GPU" if torch.cuda.is_available() else "torch sees no GPU"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    report = yield
    if report.when == "call":
        item.stash[BODY_PASSED] = report.passed
    return report
