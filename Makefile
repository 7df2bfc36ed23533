# `make help` lists the targets.
.DEFAULT_GOAL := help
.PHONY: help setup plan cluster-setup test trials test-fast lint demo picture docs site check-gpu pack-gpu-check bench-reduction bench-data bench-checkpoint bench-step clean distclean

# The environment that is active, or the one that `make setup` makes.
VENV ?= .venv
ifdef VIRTUAL_ENV
BIN := $(VIRTUAL_ENV)/bin/
else ifdef CONDA_PREFIX
BIN := $(CONDA_PREFIX)/bin/
else
BIN := $(VENV)/bin/
endif

# How a process of low priority is started; without chrt (util-linux) as any other.
IDLE := $(shell command -v chrt >/dev/null && chrt -i 0 true 2>/dev/null && echo "chrt -i 0")

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

setup: ## everything hpctrain needs: packages, .venv, Horovod and parallel h5py (cached)
	@bash scripts/setup.sh

plan: ## what `make setup` would use and build here, and why; changes nothing
	@bash scripts/setup.sh --print-plan

cluster-setup: ## what a Slurm cluster on this machine needs (Debian packages)
	@bash scripts/cluster_setup.sh

demo: setup ## pack two datasets, train, stop, resume on other ranks, verify: about two minutes
	@$(BIN)python scripts/demo.py

lint: setup ## ruff, mypy, import-linter, sizes of folders and modules
	$(BIN)ruff check .
	$(BIN)ruff format --check .
	$(BIN)mypy
	$(BIN)lint-imports
	$(BIN)python scripts/structure.py

test: lint ## all tests, with real MPI ranks
	@# The tests without ranks of their own take the time in which ranks wait: they run beside them at idle priority.
	@mkdir -p build; \
	  $(IDLE) $(BIN)python -m pytest tests/unit tests/contract -n 2 --dist loadfile --durations=10 > build/unit.log 2>&1 & \
	  unit=$$!; trap "kill $$unit" INT TERM; \
	  $(BIN)python -m pytest tests/ranks tests/faults tests/cluster --durations=10; ranks=$$?; \
	  wait $$unit; unit=$$?; cat build/unit.log; exit $$(( ranks || unit ))

trials: setup ## the long trials of checkpoints: crashes, every file operation, hostile files; some ten minutes
	HPCTRAIN_TRIALS=300 $(BIN)python -m pytest --timeout=1600 tests/faults/checkpoint/test_mounts.py \
	  tests/faults/checkpoint/test_crashes.py tests/unit/checkpoint/format/test_metadata_fuzz.py

test-fast: setup ## the tests that start no MPI ranks
	$(BIN)python -m pytest tests/unit tests/contract -m "not launches"

picture: setup ## docs/pictures/demo.svg, the picture in the README, from a run of its commands
	$(BIN)python scripts/picture.py docs/pictures/demo.svg

site: setup ## the documentation as a site: build/site/index.html
	$(BIN)python -m mkdocs build --strict

docs: setup ## write docs/recipe.md from the code
	$(BIN)python scripts/write_recipe_reference.py docs/recipe.md

bench-reduction: setup ## gradient reduction against its peers: docs/benchmarks/reduction.md; 24 minutes, alone on the machine
	$(BIN)python -m benchmarks.reduction --output benchmarks/results/reduction.json

bench-data: setup ## reading data against its peers: docs/benchmarks/data.md; eight minutes, alone on the machine
	$(BIN)python -m benchmarks.data --output benchmarks/results/data.json

bench-checkpoint: setup ## checkpoints against their peers: docs/benchmarks/checkpoint.md; eight minutes, alone on the machine
	$(BIN)python -m benchmarks.checkpoint --output benchmarks/results/checkpoint.json

bench-step: setup ## steps of the examples, the default against what can be named: docs/benchmarks/step.md; about an hour, alone on the machine
	$(BIN)python -m benchmarks.step --output benchmarks/results/step.json

check-gpu: setup ## what hpctrain does on a GPU, compared with the CPU: docs/gpu.md; without a GPU the parts that need none
	$(BIN)python -m benchmarks.gpu

pack-gpu-check: setup ## check-gpu for a machine with a GPU and no network: an archive; PYTHON_VERSION=3.12 is its Python
	$(BIN)python scripts/pack_gpu_check.py $(if $(PYTHON_VERSION),--python-version $(PYTHON_VERSION))

clean: ## remove what was made here; .venv and runs/ (your results) stay
	rm -rf build dist *.egg-info demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find hpctrain tests scripts examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv; built wheels stay in the cache
	rm -rf .venv
