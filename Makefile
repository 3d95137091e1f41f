# Everything that people type. On a fresh machine: Python 3.11 or newer, pip, git, make; nothing else.
#
#   make demo    set everything up, then: question, stream, dropped connection, resume, waterfall
#   make test    set everything up, then lint and the whole test suite
#
# .venv is built once, from requirements.lock (exact versions), and again when that or pyproject.toml
# changes. The stubs in baton/ are built from proto/ and not committed.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
STUBS := baton/v1/.generated
PROTOS := $(wildcard proto/baton/v1/*.proto)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-matrix lint up down status proto redis model lock clean

help:
	@sed -n 's/^#   //p' Makefile
	@echo "also: make test-fast | test-matrix | lint | up [ARGS=\"--gateways 2\"] | status | down | proto | lock | clean"

setup: $(INSTALLED) $(STUBS) redis

demo: setup
	@$(BIN)/baton demo $(ARGS)

up: setup
	@$(BIN)/baton up $(ARGS)

# Neither builds anything: a stack must be stoppable whatever state the tree is in.
down status:
	@if [ -x $(BIN)/baton ]; then $(BIN)/baton $@; else echo "nothing was set up here"; fi

# The slow ones start whole stacks, and measure: one at a time. The matrix waits more than it computes.
test: setup lint model
	$(BIN)/pytest -n 2 -m "not slow" tests/unit tests/integration
	$(BIN)/pytest -m "slow and not matrix"
	$(PYTEST_MATRIX)

# The random test first: it is the longest, and by itself. About three minutes on two busy cores.
PYTEST_MATRIX = $(BIN)/pytest -n 2 --dist loadgroup -m matrix \
	tests/integration/test_random_failures.py tests/integration/test_failure_matrix.py \
	tests/integration/test_failures_beside_messages.py

test-matrix: setup
	$(PYTEST_MATRIX)

test-fast: setup
	$(BIN)/pytest -n 2 -m "not slow" tests/unit tests/integration

lint: $(INSTALLED) $(STUBS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: $(STUBS)

# Before the tests, so that a slow download does not look like a slow test.
model: $(INSTALLED) $(STUBS)
	@$(BIN)/python -m cli.model

# The first Python of at least 3.11, by whatever name.
FIND_PYTHON = for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; python=; done; \
	[ -n "$$python" ] || { echo "Python 3.11 or newer is needed; name one with make PYTHON=..." >&2; exit 1; }

# Some distributions ship venv without the pip to put into it; the machine's pip can do that as well.
MAKE_VENV = { $$python -m venv $(1) 2>/dev/null || { rm -rf $(1) && $$python -m venv --without-pip $(1) \
	&& $$python -m pip --python $(1)/bin/python install --quiet pip; }; }

$(INSTALLED): requirements.lock pyproject.toml
	@echo "setting up $(VENV) (a few minutes the first time)"
	@$(FIND_PYTHON); [ -x $(BIN)/pip ] || $(call MAKE_VENV,$(VENV))
	$(BIN)/python -m pip install --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(STUBS): proto/generate.py $(PROTOS) | $(INSTALLED)
	$(BIN)/python proto/generate.py
	@touch $@

NO_REDIS = echo "notice: redis-server is missing and could not be installed ($(1)); replies will live in the gateway's memory" >&2

redis:
	@command -v redis-server >/dev/null && exit 0; \
	command -v apt-get >/dev/null || { $(call NO_REDIS,no apt-get); exit 0; }; \
	if [ "$$(id -u)" = 0 ]; then as_root=; \
	elif sudo -n true 2>/dev/null; then as_root="sudo -n"; \
	else $(call NO_REDIS,not root); exit 0; fi; \
	echo "installing redis-server"; \
	{ $$as_root apt-get update -qq && \
	  $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server; \
	} >/dev/null </dev/null || $(call NO_REDIS,apt-get failed)

# Resolves pyproject.toml afresh. What only a CUDA build of torch asks for is left to torch.
lock:
	rm -rf .cache/lock
	@$(FIND_PYTHON); $(call MAKE_VENV,.cache/lock)
	.cache/lock/bin/python -m pip install --disable-pip-version-check '.[dev]' hatchling editables
	.cache/lock/bin/python -m pip freeze --all \
	  | sed -n 's/^\([A-Za-z0-9._-]*==[^+@ ]*\).*/\1/p' | tr 'A-Z_' 'a-z-' \
	  | grep -vE '^(pip|baton-serve|triton|nvidia-.*|cuda-.*)==' | sort > requirements.lock.new
	mv requirements.lock.new requirements.lock
	rm -rf .cache/lock

clean: down
	rm -rf $(VENV) baton .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
