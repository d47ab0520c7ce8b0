"""One Hypothesis profile for all: the machines that run this are shared, so no deadlines."""

from hypothesis import settings

settings.register_profile("house", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("house")
