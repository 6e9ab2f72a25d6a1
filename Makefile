# `make` lists what there is to do. Every target sets up what it needs; the first one takes about
# three minutes for that, once. PYTHON and SGLANG_KVSHARE_CACHE are explained in scripts/env.sh.

PYTHON ?=
CACHE := $(or $(SGLANG_KVSHARE_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/sglang-kvshare)

PY := .venv/bin/python
MODEL := smollm2-135m-instruct
MODEL_DIR := $(CACHE)/models/$(MODEL)

.DEFAULT_GOAL := help
.PHONY: help env model demo test test-patched kits soak lint format eval bench bench-index clean
.NOTPARALLEL:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' Makefile

env: ## make or update the environment (.venv, and the packages in the cache)
	@PYTHON='$(PYTHON)' SGLANG_KVSHARE_CACHE='$(CACHE)' scripts/env.sh

model: env ## fetch the model to start with, into the cache
	@.venv/bin/kvshare model $(MODEL) '$(MODEL_DIR)'

demo: model ## see it work: five passages in five orders, with KVShare and without
	@$(PY) -m kvshare_eval.demo --model '$(MODEL_DIR)'

test: lint model ## run everything that needs no GPU
	@OMP_NUM_THREADS=1 SGLANG_KVSHARE_TEST_MODEL='$(MODEL_DIR)' \
	  $(PY) -m pytest -n 2 --no-loadscope-reorder -m 'not gpu and not kits_full'

test-patched: model ## the same with a copy of SGLang in which all patches are (docs/patches.md)
	@$(PY) tests/engine/patched_site.py build/patched
	@OMP_NUM_THREADS=1 SGLANG_KVSHARE_TEST_MODEL='$(MODEL_DIR)' \
	  build/patched/bin/python -m pytest -n 2 --no-loadscope-reorder -m 'not gpu and not kits_full' $(TESTS)

kits: model ## run SGLang's own test kits at length, a server for every mode (half an hour and more)
	@SGLANG_KVSHARE_TEST_MODEL='$(MODEL_DIR)' $(PY) -m pytest tests/e2e/test_sglang_kits.py -m kits_full

soak: env ## a hundred thousand steps of the state machine over the scheduler; takes hours
	@$(PY) tests/engine/soak.py $(SOAK)

lint: env ## ruff on everything, mypy in strict mode on the core
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: env ## let ruff rewrite the sources
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

eval: model ## measure quality and speed on the small model and write a page (an hour and more)
	@.venv/bin/kvshare eval quality --model '$(MODEL_DIR)' --no-answers --out build/eval/quality --resume
	@.venv/bin/kvshare eval serving --model '$(MODEL_DIR)' --out build/eval/serving --resume
	@.venv/bin/kvshare eval report build/eval/quality build/eval/serving --out build/eval/report.md

bench: model ## measure the time to the first token with and without reuse
	@$(PY) -m kvshare_eval.serving.bench_reuse --model '$(MODEL_DIR)'

bench-index: env ## measure matching: time, memory and upkeep of the run index
	@OMP_NUM_THREADS=1 $(PY) -m kvshare_eval.matching.bench_index

clean: ## remove what was made in this checkout; the cache stays
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
