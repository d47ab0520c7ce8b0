"""One Hypothesis profile for all (the machines that run this are shared, so no deadlines), and the two backends."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from adafactor import optimizer
from adafactor.kernels import choose

settings.register_profile("house", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("house")


@pytest.fixture(scope="module", params=["eager", "cpu"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `backend="auto"` stands for: a module that uses this runs once with each."""
    name: str = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            optimizer, "choose", lambda asked, on_cpu=True: choose(name if asked == "auto" else asked, on_cpu)
        )
        yield name
