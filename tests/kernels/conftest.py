"""The interpreter's tests begin before all others: they take the core that the others, in one process, leave idle."""

import pytest

from tests.kernels import interpreter


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start them, if they are asked for."""
    if any(item.name == "test_in_the_interpreter" for item in session.items) and not session.config.option.collectonly:
        interpreter.RUNNING.append(interpreter.start("not slow"))


def pytest_sessionfinish() -> None:
    """Leave nothing behind when the tests are stopped."""
    for process in interpreter.RUNNING:
        process.kill()
        process.wait()
