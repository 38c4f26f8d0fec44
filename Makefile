# Two commands do everything on a fresh Debian 12: `make run` and `make test`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
TRITON_VENV := .venv-triton
BIN := $(VENV)/bin
PYTHON := $(BIN)/python
PIP_INSTALL := -m pip --disable-pip-version-check --quiet install --require-hashes --no-deps

.PHONY: help run up test test-slow check install lock protos clean

help: ## Lists the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

run: install ## Brings the mesh up, sends real requests, prints where each went, stops it
	@$(BIN)/modalmesh run

up: install ## Brings the mesh up and keeps it in the foreground; Ctrl-C stops it
	@$(BIN)/modalmesh up

test: install check ## Checks, then every test that is not slow
	@$(PYTHON) -m pytest -m "not slow"

test-slow: install ## The slow tests
	@$(PYTHON) -m pytest -m slow

check: install ## Style, types, layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

install: .build/system $(VENV)/.installed $(TRITON_VENV)/.installed xds/pb/__init__.py .build/bpf ## Installs system packages and both environments

.build/system: scripts/install-system-packages.sh
	@scripts/install-system-packages.sh
	@mkdir -p .build && touch $@

# --system-site-packages: Debian's bcc is found there.
$(VENV)/.installed: requirements.lock pyproject.toml setup.py | .build/system
	@echo "Installing the mesh's Python packages into $(VENV) (two minutes the first time) ..."
	@test -x $(PYTHON) || /usr/bin/python3 -m venv --system-site-packages $(VENV)
	@$(PYTHON) $(PIP_INSTALL) -r requirements.lock
	@$(PYTHON) -m pip --disable-pip-version-check --quiet install --no-deps --no-build-isolation --editable .
	@touch $@

# Triton's Python backend wants numpy 1, the mesh numpy 2: an environment of its own.
$(TRITON_VENV)/.installed: deploy/triton/requirements.lock | .build/system
	@echo "Installing the Triton server into $(TRITON_VENV) ..."
	@test -x $(TRITON_VENV)/bin/python || /usr/bin/python3 -m venv $(TRITON_VENV)
	@$(TRITON_VENV)/bin/python $(PIP_INSTALL) -r deploy/triton/requirements.lock
	@touch $@

xds/pb/__init__.py: xds/descriptors.binpb tools/protos.py $(wildcard xds/*.proto router/*.proto router/*/*.proto bpf/*.proto) | $(VENV)/.installed
	@$(PYTHON) tools/protos.py generate

.build/bpf: bpf/build.py $(wildcard bpf/programs/*.[ch]) $(if $(wildcard bpf/programs/*.bpf.o),,.FORCE) | .build/system
	@/usr/bin/python3 -m bpf.build
	@mkdir -p .build
	@touch $@

.FORCE:

protos: ## Generates xds/pb again
	@$(PYTHON) tools/protos.py generate

lock: ## Resolves both lock files again (needs uv)
	uv pip compile --quiet --python /usr/bin/python3 --generate-hashes --no-emit-index-url --no-annotate \
	    --custom-compile-command "make lock" --all-extras --upgrade pyproject.toml -o requirements.lock
	uv pip compile --quiet --python /usr/bin/python3 --generate-hashes --no-emit-index-url --no-annotate \
	    --custom-compile-command "make lock" --upgrade deploy/triton/requirements.in -o deploy/triton/requirements.lock

clean: ## Removes environments and everything built
	rm -rf $(VENV) $(TRITON_VENV) .build xds/pb bpf/programs/*.bpf.o build dist *.egg-info
