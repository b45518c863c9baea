# SPDX-License-Identifier: Apache-2.0
# Everything runs inside .venv at the root of this checkout.
#   make setup   make .venv, or bring it up to date; the others do it too
#   make demo    serve a model with its KV cache in LMCache, on a simulated NPU
#   make test    run all tests
#   make bench   measure KV transfers against their targets, in about three minutes
#   make campaign   random traffic with an LMCache server while anything fails;
#                SEEDS=N or FIRST..LAST
#   make lint    ruff, mypy, clang-format
#   make wheel   build both wheels and LMCache's sdist into dist/; LMCACHE=next: of the
#                second release of LMCache that upstream.toml pins
#   make setup-next   make .venv-next: that release in front of the packages of .venv
#   make test-next    run its tests there
#   make setup-stack  make .venv-stack: .venv-next with the next vllm-rbln and its vLLM
#   make test-stack   run engines there: the demo, each layout, each transport
#   make test-upstream   LMCache's own tests over our wheel, in about five minutes
#   make bump VERSION=X.Y.Z   move to another release of LMCache, see docs/bump.md
#   make clean   remove what builds made; .venv stays (make distclean removes it too)

# 3.11 is what the pinned packages were resolved for.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# Tests that start servers and commands, and so spend their time in other processes than
# pytest's.
SERVING_TESTS := tests/e2e tests/examples tests/support tests/buildkite tests/docs \
    tests/benchmarks/test_mp_server.py
# Tests that compile.
BUILD_TESTS := tests/build
NEXT_TESTS := tests/v1/gpu_connector tests/v1/multiprocess tests/upstream \
    tests/v1/platform/devices/rbln/test_engine_groups.py \
    tests/integration lmcache-rbln/tests/integration/vllm/test_interface.py \
    tests/build/test_patches.py tests/e2e/test_hybrid.py \
    tests/e2e/test_transport.py::test_server_restarts_while_the_worker_serves
STACK_TESTS := tests/integration lmcache-rbln/tests/integration \
    sim/tests/test_rebel_attention.py sim/tests/test_rebel_register.py \
    tests/e2e/test_restore.py tests/e2e/test_sized.py tests/e2e/test_transport.py \
    tests/e2e/inprocess/test_documented_launch.py tests/e2e/inprocess/test_partial.py
TESTS := $(wildcard tests sim/tests lmcache-rbln/tests)
PYTHON_SOURCES := $(wildcard setup.py conftest.py setup_extensions dev tools lmcache \
    sim lmcache-rbln examples benchmarks tests .buildkite)
CXX_SOURCES = $(shell git ls-files '*.cc' '*.cpp' '*.h')

.PHONY: setup setup-next setup-stack test-next test-stack test-upstream help demo bench campaign bump test test-serving test-others test-native lint wheel clean distclean

setup:
	@LMCACHE= $(PYTHON) dev/setup_env.py

setup-next: setup
	@LMCACHE=next $(PYTHON) dev/setup_env.py

setup-stack: setup
	@LMCACHE=next STACK=next $(PYTHON) dev/setup_env.py

# What the list above says.
help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

demo: setup
	@$(BIN)/python -m examples.rbln_demo

# Both parts run, whatever the first one says.
bench: setup
	@$(BIN)/python -m benchmarks.block_transfer --check; status=$$?; \
	$(BIN)/python -m benchmarks.mp_server --quick --part transfer --transport shm \
	    --check && exit $$status

SEEDS ?= 20
campaign: setup
	@$(BIN)/python -m tests.campaigns.multiprocess --seeds $(SEEDS)

# Three parts at once: CI has two cores, and two parts leave a quarter of them idle.
test: setup
	@$(MAKE) --no-print-directory -j3 test-serving test-others test-native

# Of the second release: detection, transfers through its workers and its server,
# LMCache's own tests, three engines; and that both releases store the same.
test-next: setup-next
	.venv-next/bin/python -m pytest $(NEXT_TESTS) --runtime sim $(PYTEST_ARGS)

# With the other parts of the next stack: engines, layouts, transports, interfaces.
test-stack: setup-stack
	.venv-stack/bin/python -m examples.rbln_demo --folder $(CURDIR)/build/demo-stack
	.venv-stack/bin/python -m pytest $(STACK_TESTS) --runtime sim $(PYTEST_ARGS)

test-upstream: setup
	$(BIN)/python -m tests.upstream.suites

test-serving:
	$(BIN)/python -m pytest $(SERVING_TESTS) $(PYTEST_ARGS)

# All of a part runs, whatever fails first. What the sanitizers run is what `make -C sim
# test` runs; the optimized library is under all other tests. Tests that compile follow.
test-native:
	@status=0; \
	$(MAKE) -C sim test-asan test-tsan || status=1; \
	$(MAKE) -C csrc/kv_transpose test test-asan test-tsan test-portable || status=1; \
	$(BIN)/python -m pytest $(BUILD_TESTS) $(PYTEST_ARGS) || status=1; \
	exit $$status

test-others:
	@status=0; \
	for schedule in latest 1; do \
	    RBLN_SIM_DEFERRED=$$schedule $(BIN)/python -m pytest tests lmcache-rbln/tests \
	        --runtime sim -m deferred $(PYTEST_ARGS) || status=1; \
	done; \
	$(BIN)/python -m pytest $(TESTS) $(SERVING_TESTS:%=--ignore=%) \
	    $(BUILD_TESTS:%=--ignore=%) $(PYTEST_ARGS) || status=1; \
	exit $$status

lint: setup
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(BIN)/mypy $(PYTHON_SOURCES)
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)

wheel: setup
	$(BIN)/python -m build --no-isolation --sdist --wheel --outdir dist .
	$(BIN)/python -m build --no-isolation --wheel --outdir dist lmcache-rbln

bump: setup
	$(BIN)/python tools/bump_upstream.py $(VERSION) $(BUMP_ARGS)

clean:
	$(MAKE) -C sim clean
	$(MAKE) -C csrc/kv_transpose clean
	rm -rf build/wheel build/egg-info build/stage-* dist lmcache-rbln/build
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache

distclean: clean
	rm -rf .venv build
