"""Triton's step on a card: `pytest tests/gpu` on any rented one, in a few minutes; it ends in a page for an issue.

Without a GPU the tests that can run in Triton's interpreter do, and the others are skipped.
"""

from __future__ import annotations

import platform

import pytest
import torch

from tests import interpreter

MODULE = next((m for m in (torch.cuda, torch.xpu) if m.is_available()), None)
IS_CARD = MODULE is not None and not interpreter.IS_THERE
collect_ignore_glob = [] if IS_CARD or interpreter.IS_THERE else ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tensors are: on the card, or on the CPU for the interpreter."""
    if not IS_CARD:
        return torch.device("cpu")
    return torch.device("cuda" if MODULE is torch.cuda else "xpu")


@pytest.fixture(scope="session")
def card(device: torch.device) -> torch.device:
    """The card, or skip."""
    if not IS_CARD:
        pytest.skip("there is no GPU, or TRITON_INTERPRET=1 is set")
    return device


@pytest.fixture(scope="session")
def page(request: pytest.FixtureRequest) -> list[str]:
    """Lines for the page at the end."""
    lines: list[str] = []
    request.config.stash[LINES] = lines
    return lines


LINES = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write what to paste into an issue, whether all is right or not."""
    if not IS_CARD:
        return
    import triton

    from adafactor import __version__

    assert MODULE is not None
    count = {how: len(terminalreporter.stats.get(how, [])) for how in ("passed", "failed", "error", "skipped")}
    terminalreporter.section("paste this into an issue")
    for line in (
        f"card: {MODULE.get_device_name()}",
        f"adafactor {__version__}, torch {torch.__version__}, Triton {triton.__version__}, Python "
        f"{platform.python_version()}",
        ", ".join(f"{number} {how}" for how, number in count.items()),
        *(f"- {report.nodeid}" for report in terminalreporter.stats.get("failed", [])),
        *config.stash.get(LINES, []),
    ):
        terminalreporter.write_line(line)
