# Every target makes its own .venv when it is missing, and again when pyproject.toml or the C++ core has changed.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo reproduce quick test test-tools test-all lint sanitize docs bench matrix release clean

demo: .venv/ready
	$(BIN)/python -m lab demo

# All of the paper's experiments: hours. Stop it at any time; it continues where it was.
reproduce: .venv/ready
	$(BIN)/python -m lab reproduce

# Two tests at once, each with one of torch's threads.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
TOOLS := tests/tools tests/lab

# While you work: every property, the oracle and the paper, in plain torch alone. About half a minute.
QUICK := tests/test_properties.py $(wildcard $(addprefix tests/step/test_,oracle.py paper.py arguments.py))

quick: .venv/ready
	$(PYTEST) --only-backend eager $(QUICK)

# The optimizer: its steps on every backend, sharded and inside backward, its state, and each tool once.
test: .venv/ready
	$(PYTEST) -m "not slow" $(addprefix --ignore=,$(TOOLS))

# The tools and the lab at length, the benchmarks, the site and the release.
test-tools: .venv/ready
	$(PYTEST) -m "not slow" $(TOOLS)

# Both, what is slow, other people's trainers and optimizers, and the GPU kernels compiled for cards: about an hour.
# What draws its cases goes on for FUZZ_SECONDS: 20 in `make test`.
test-all: .venv/ready .venv/integrations .venv/trainers .venv/bench
	FUZZ_SECONDS=$${FUZZ_SECONDS:-600} $(PYTEST)
	TRITON_INTERPRET=0 $(PYTEST) tests/kernels/test_triton_compiled.py

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(filter %.h %.cpp,$(CORE))

# The C++ core with the compiler's checks of addresses and of what C++ leaves undefined: some minutes.
sanitize: .venv/ready
	$(BIN)/python tests/kernels/sanitize.py

# Into site/, warnings as errors, nothing fetched. To read it with its search: python -m http.server -d site
docs: .venv/ready
	$(BIN)/python -m zensical build --strict --clean

# Long, and it wants an otherwise idle machine. `python -m benchmarks --help` for parts of it.
bench: .venv/bench
	$(BIN)/python -m benchmarks

# The core's tests with the oldest and newest versions that docs/machines.md names, one venv for each: an hour or more.
matrix:
	$(PYTHON) -m tools.matrix --prune

# Sdist and wheel into dist/, checked and tried in a venv of their own. Nothing is uploaded.
release: .venv/release
	$(BIN)/python -m tools.release

CORE := $(wildcard src/adafactor/kernels/cpu/src/*)

.venv/ready: pyproject.toml setup.py constraints.txt $(CORE)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing torch and the tools into .venv (once, about a minute) ..."
	$(INSTALL) torch
	$(INSTALL) -e ".[dev]"
	touch $@

.venv/integrations: .venv/ready
	$(INSTALL) -e ".[integrations]"
	touch $@

# Trainers that take an optimizer by configuration, and models: without all else that they would bring, which the code that
# is run of them does not use.
.venv/trainers: .venv/integrations
	$(INSTALL) --no-deps antlr4-python3-runtime diffusers hydra-core litgpt nemo_automodel omegaconf spmd-types torchtitan
	$(INSTALL) requests tyro
	touch $@

# timm would bring torchvision, which its optimizers do not use. The plan's 8-bit AdamW is that of bitsandbytes.
.venv/bench: .venv/ready
	$(INSTALL) -e ".[bench,jax]"
	$(INSTALL) --no-deps bitsandbytes timm
	touch $@

.venv/release: .venv/ready
	$(INSTALL) -e ".[release]"
	touch $@

clean:
	rm -rf build src/adafactor/kernels/cpu/*.so .venv .matrix dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache site
