# `make help` lists the targets.
.DEFAULT_GOAL := help
.PHONY: help setup plan bundle cluster-setup test trials trials-slurm trials-bundle platforms mpis newest oldest test-fast lint demo picture report-picture docs site check-gpu pack-gpu-check bench bench-reduction bench-data bench-checkpoint bench-step bench-growth bench-async bench-overhead bench-parallel bench-prediction bench-start clean distclean

# The environment that is active, or the one that `make setup` makes.
VENV ?= .venv
ifdef VIRTUAL_ENV
BIN := $(VIRTUAL_ENV)/bin/
else ifdef CONDA_PREFIX
BIN := $(CONDA_PREFIX)/bin/
else
BIN := $(VENV)/bin/
endif

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

setup: ## everything hpctrain needs: packages, .venv, Horovod and parallel h5py (cached); BUNDLE=PATH: without network
	@bash scripts/setup.sh

plan: ## what `make setup` would use and build here, and why; changes nothing
	@bash scripts/setup.sh --print-plan

bundle: ## all that `make setup` downloads, as one archive for a machine without network; PYTHON_VERSION=3.12 GLIBC=28 TORCH=...
	@$(or $(PYTHON),python3) scripts/pack_bundle.py $(if $(PYTHON_VERSION),--python-version $(PYTHON_VERSION)) \
	  $(if $(GLIBC),--glibc $(GLIBC)) $(if $(TORCH),--torch $(TORCH)) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) \
	  $(if $(RUNTIME_ONLY),--runtime-only)

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

test: setup ## lint and all tests, with real MPI ranks; what fails is run again, alone
	@bash scripts/run_tests.sh "$(BIN)"

trials: setup ## the long trials of checkpoints: crashes, every file operation, hostile files; and the tests with the mark `thorough`; some 20 minutes
	HPCTRAIN_TRIALS=300 $(BIN)python -m pytest --timeout=1600 tests/faults/checkpoint/test_mounts.py \
	  tests/faults/checkpoint/test_crashes.py tests/unit/checkpoint/format/test_metadata_fuzz.py
	$(BIN)python -m pytest -m thorough tests/unit tests/gpu tests/ranks tests/faults

trials-slurm: setup ## the long trials on a Slurm cluster of this machine's own, as root: docs/benchmarks/slurm-trials.md; TRIALS=100 of each; about two hours
	HPCTRAIN_CLUSTER=required HPCTRAIN_TRIALS=$(or $(TRIALS),100) $(BIN)python -m pytest -m "trials or thorough" -s tests/cluster

trials-bundle: setup ## an archive of `make bundle`, a set-up from it in a namespace without network, and the demo there; 20 minutes
	rm -f build/trials/*.tar
	$(BIN)python scripts/pack_bundle.py --output build/trials
	HPCTRAIN_BUNDLE=$$(echo $(CURDIR)/build/trials/hpctrain-bundle-*.tar) $(BIN)python -m pytest -s tests/ranks/setup

platforms: ## demo and tests on other releases of Debian, as root: docs/platforms.md; PLATFORMS="bookworm trixie testing"; an hour each
	bash scripts/platforms.sh $(PLATFORMS)

mpis: setup ## what `hpctrain launch` promises, trainings and contract tests, with MPICH, Intel MPI and Open MPI 5: docs/platforms.md; MPIS="mpich debian-mpich impi openmpi" TIMES=1
	bash scripts/mpis.sh $(MPIS) -- --times $(or $(TIMES),1)
	bash scripts/mpis.sh $(MPIS) -- trainings
	bash scripts/mpis.sh $(MPIS) -- contract

newest oldest: ## tests with every dependency at its newest release, at the oldest that setup.py allows: docs/platforms.md
	bash scripts/releases.sh $@

test-fast: setup ## the tests that start no MPI ranks
	$(BIN)python -m pytest tests/unit tests/contract -m "not launches and not thorough"

picture: setup ## docs/pictures/demo.svg, the picture in the README, from a run of its commands
	$(BIN)python scripts/picture.py docs/pictures/demo.svg

report-picture: setup ## docs/pictures/report.png, the report in docs/first-steps.md, from a scaling sweep on this machine; two minutes, and Chromium
	$(BIN)python scripts/report_picture.py docs/pictures/report.png

site: setup ## the documentation as a site: build/site/index.html
	$(BIN)python -m mkdocs build --strict

docs: setup ## write docs/recipe.md, slurm/*.sbatch and deploy/monitoring from the code, docs/results.md and the README's table from benchmarks/results
	$(BIN)python scripts/write_recipe_reference.py docs/recipe.md
	$(BIN)python scripts/write_ready_scripts.py
	$(BIN)python scripts/write_monitoring.py
	$(BIN)python -m benchmarks.headlines

bench: setup ## the headline figures of all benchmarks, in turn with peers: docs/results.md; ten minutes, alone on the machine
	$(BIN)python -m benchmarks.quick --output benchmarks/results/quick.json

bench-reduction: setup ## gradient reduction against its peers: docs/benchmarks/reduction.md; 24 minutes, alone on the machine
	$(BIN)python -m benchmarks.reduction --output benchmarks/results/reduction.json

bench-data: setup ## reading data against its peers: docs/benchmarks/data.md; eight minutes, alone on the machine
	$(BIN)python -m benchmarks.data --output benchmarks/results/data.json

bench-checkpoint: setup ## checkpoints against their peers: docs/benchmarks/checkpoint.md; eight minutes, alone on the machine
	$(BIN)python -m benchmarks.checkpoint --output benchmarks/results/checkpoint.json

bench-step: setup ## steps of the examples, the default against what can be named: docs/benchmarks/step.md; about an hour, alone on the machine
	$(BIN)python -m benchmarks.step --output benchmarks/results/step.json

bench-growth: setup ## what a run costs with 2 to 48 ranks and how that grows: docs/benchmarks/growth.md; half an hour, alone on the machine
	$(BIN)python -m benchmarks.growth --output benchmarks/results/growth.json

bench-async: setup ## fewer synchronisations against synchronous training and peers: docs/benchmarks/async.md; 25 minutes, alone on the machine, as root
	$(BIN)python -m benchmarks.asynchronous --output benchmarks/results/async.json

bench-overhead: setup ## what stopping, comparing the ranks and the guards add to a step: docs/benchmarks/overhead.md; three minutes, alone on the machine
	$(BIN)python -m benchmarks.overhead --output benchmarks/results/overhead.json

bench-parallel: setup ## split models against one rank, formulas and torch's peers, and Horovod's: docs/benchmarks/parallel.md; 40 minutes, alone on the machine, as root
	$(BIN)python -m benchmarks.parallel --output benchmarks/results/parallel.json

bench-prediction: setup ## predicted against measured steps on four nodes: docs/benchmarks/prediction.md; ten minutes, alone on the machine, as root
	$(BIN)python -m benchmarks.prediction --output benchmarks/results/prediction.json

bench-start: setup ## starting 1 to 48 ranks, without and with a fork server: docs/benchmarks/start.md; half an hour, alone on the machine
	$(BIN)python -m benchmarks.start --output benchmarks/results/start.json

check-gpu: setup ## what hpctrain does on a GPU, compared with the CPU: docs/gpu.md; without a GPU the parts that need none
	$(BIN)python -m tests.gpu

pack-gpu-check: setup ## check-gpu for a machine with a GPU and no network: an archive; PYTHON_VERSION=3.12 is its Python
	$(BIN)python scripts/pack_gpu_check.py $(if $(PYTHON_VERSION),--python-version $(PYTHON_VERSION))

clean: ## remove what was made here; .venv and runs/ (your results) stay
	rm -rf build dist *.egg-info demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find hpctrain tests scripts examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv; built wheels stay in the cache
	rm -rf .venv
