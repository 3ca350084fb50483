# Every target prepares what it needs first (see tools/bootstrap.py) and skips what is up to date.
# PYTHON=python3.12 names another Python; RINGCOMM_USE_ENV=1 uses the active environment and its
# torch, RINGCOMM_TORCH=active its torch alone; RINGCOMM_TORCH_INDEX=URL is where torch comes from;
# ARGS="..." goes to the program; FORM=short leaves out some tests under sanitizers; RANKS=4 and
# RACE="..." are for `make train`; VERBOSE=1 shows what pip and the compilers say. .ci/run runs jobs.

PYTHON ?= python3
ARGS ?=
RANKS ?= 2
RACE ?=
WORKERS ?= auto
ROOT := $(patsubst %/,%,$(dir $(abspath $(lastword $(MAKEFILE_LIST)))))
PREPARE := cd "$(ROOT)" && "$(PYTHON)" tools/bootstrap.py
CPP := $(MAKE) --no-print-directory -C "$(ROOT)/tests/cpp"

# Tests start many processes, each of which would compile its modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
# Targets share .venv and build/, so they run one after the other; the two halves of test do not.
ifneq ($(MAKECMDGOALS),test-cpp-beside test-python)
.NOTPARALLEL:
endif
.PHONY: help train build test test-cpp test-cpp-beside test-python test-gpu kernels kernel-sweep lint format types \
        wheels gpu-kit docs coverage bench clean check-python

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' "$(ROOT)/Makefile" | while IFS='|' read -r name text; do \
	    printf '  make %-14s %s\n' "$$name" "$$text"; done

RACED := --systems ddp,zero-1,lomo,tensor --over gloo --width 256 --layers 5 --rows 4 --tokens 128
train: check-python  ## train a small model, compare its losses with Gloo's, time training systems (ARGS="--steps 100" RACE="--seconds 8")
	@export OMP_NUM_THREADS=1; $(PREPARE) --need train --extension -- -m torch.distributed.run --standalone \
	    --nproc-per-node $(RANKS) examples/train.py $(ARGS)
	@$(PREPARE) --need train --extension -- -m ringcomm bench systems $(RACED) $(RACE)

build: check-python  ## make the environment .venv and build the extension in it
	@$(PREPARE) --extension

# Files in order: those of the last folders are short, so that no process runs long alone at the end.
BY_FILE := --dist=loadfile --no-loadscope-reorder
# The C++ tests wait more than they compute: they run beside the Python tests, and are shown after them.
CPP_OUTPUT := $(ROOT)/build/cpp/tests.txt
test: check-python  ## run the C++ tests and the Python tests that are not slow
	@$(CPP) build
	@status=0; $(MAKE) --no-print-directory -C "$(ROOT)" -j2 test-cpp-beside test-python \
	    ARGS="-m 'not slow' --numprocesses=$(WORKERS) $(BY_FILE)" || status=$$?; \
	    cat "$(CPP_OUTPUT)"; exit $$status

test-cpp-beside:
	@$(CPP) run ARGS= >"$(CPP_OUTPUT)" 2>&1

test-cpp:  ## run the C++ tests; under a sanitizer (WITH=tsan, asan), or the checker of the protocols (WITH=checker)
	@$(CPP) run$(WITH:%=-%) PYTHON="$(PYTHON)"

test-python: check-python  ## run the Python tests (ARGS="-k name ...")
	@$(PREPARE) --need train --need test --extension -- -m pytest $(ARGS)

kernels: check-python  ## compile the CUDA kernels with nvcc, and compare their machine code with the table
	@$(PREPARE) --need nvcc --need test -- tools/cuda_kernels.py
	@$(PREPARE) --need test -- tests/sass/gate.py

# A kit (make gpu-kit) has it: nothing is compiled again there, whatever the times of files are.
kernel-sweep: check-python  ## build build/gpu/kernel_sweep, which times and verifies the CUDA kernels, and build/gpu/probe, without torch (HELD=8)
ifndef RINGCOMM_PREBUILT
	@cd "$(ROOT)" && "$(PYTHON)" tools/cuda_kernels.py $(HELD)
	@$(MAKE) --no-print-directory -C "$(ROOT)/benchmarks/gpu" HELD=$(HELD)
endif

test-gpu: export RINGCOMM_CUDA := 1
test-gpu: check-python  ## run the GPU tests in each layout of ranks that this machine supports (LAYOUT=one-2-mps)
	@$(PREPARE) --need train --need test --extension -- tools/verify_gpu.py --layout $(or $(LAYOUT),every) $(ARGS)

# Every check runs, also after one has failed. The tools are beside the prepared Python.
LINT = status=0; \
    ruff check $(1) . || status=1; \
    ruff format -q $(2) . || status=1; \
    python tools/check_tests.py || status=1; \
    find csrc kernels tests/cpp tests/emulator tests/ptx benchmarks/gpu -not -path '*/third_party/*' \
        '(' -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' ')' -print0 \
        | xargs -0 clang-format $(3) || status=1; \
    exit $$status
LINTED := $(PREPARE) --need lint --no-torch -- -c 'import os, sys; \
    os.environ["PATH"] = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]; \
    os.execvp("sh", ["sh", "-c", os.environ["LINT_COMMAND"]])'
lint: export LINT_COMMAND = $(call LINT,,--check,--dry-run -Werror -ferror-limit=1)
lint: check-python  ## check the code with ruff and clang-format, and that each test asserts something
	@$(LINTED)

format: export LINT_COMMAND = $(call LINT,--fix,,-i)
format: check-python  ## format the code with ruff and clang-format
	@$(LINTED)

# Examples have scripts of the same names as benchmarks. Both are checked, also after one has failed.
TYPED := $(PREPARE) --need lint --need train --need test -- -m mypy
types: check-python  ## check the types with mypy
	@status=0; $(TYPED) ringcomm kernels benchmarks tools tests _ringcomm noxfile.py || status=1; \
	$(TYPED) examples || status=1; exit $$status

gpu-kit: check-python  ## build the folder gpu-kit for a machine with a GPU, where gpu-kit/run uses it
	@$(PREPARE) --need nvcc --no-torch
	@$(PREPARE) --no-torch --need nox -- -m nox -s gpu --error-on-missing-interpreters -- kit

wheels: check-python  ## build a wheel for each Python that is here, for torch 2.13, 2.14 and 2.15, in dist (ARGS="--python 3.12 -- 2.13")
	@$(PREPARE) --no-torch --need nox -- -m nox -s part wheels wheels_made \
	    --$(if $(ARGS),,no-)error-on-missing-interpreters $(ARGS)

docs: check-python  ## build the site of docs/ in build/site
	@export NO_MKDOCS_2_WARNING=1; $(PREPARE) --need docs --no-torch -- -m mkdocs build --strict $(ARGS)
	@echo "open build/site/index.html in a browser; with search: python3 -m http.server -d build/site"

coverage: check-python  ## measure which lines of Python and C++ the tests run, in 20 minutes
	@$(CPP) run-coverage
	@$(PREPARE) --need coverage --no-torch -- -m gcovr --filter csrc/ --filter kernels/ --merge-lines \
	    --print-summary --sort uncovered-number build/cpp/coverage -o build/coverage-cpp.txt
	@$(PREPARE) --need train --need test --need coverage --extension -- -m coverage run -m pytest $(ARGS)
	@$(PREPARE) --need coverage --no-torch -- -m coverage combine -q
	@$(PREPARE) --need coverage --no-torch -- -m coverage report

bench: check-python  ## run all benchmarks, and make their tables and plots (ARGS="--only floor --seconds 1")
	@$(PREPARE) --need train --extension -- benchmarks/run_all.py $(ARGS)

clean:  ## remove what was built, except .venv and .cache (ALL=1: these too)
	@cd "$(ROOT)" && rm -rf build dist sdist *.egg-info ringcomm/_*.so .pytest_cache .mypy_cache \
	    .ruff_cache $(if $(ALL),.venv .cache) && find ringcomm kernels examples benchmarks tools tests -name __pycache__ \
	    -type d -prune -exec rm -rf {} +

check-python:
	@command -v "$(PYTHON)" >/dev/null || { echo "ringcomm: $(PYTHON) is not on PATH. Install" \
	    "it: apt-get install python3 python3-venv python3-dev; or name one: make PYTHON=..."; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "ringcomm:" \
	    "Python >= 3.10 is needed; $(PYTHON) is $$("$(PYTHON)" --version 2>&1). Install a newer" \
	    "one, and name it: make PYTHON=python3.12"; exit 1; }
