# Every target prepares what it needs first (see tools/bootstrap.py) and skips what is up to date.
# PYTHON=python3.12 names another Python; RINGCOMM_USE_ENV=1 uses the active environment and its
# torch, RINGCOMM_TORCH=active its torch alone; RINGCOMM_TORCH_INDEX=URL is where torch comes from;
# ARGS="..." goes to the program; RANKS=4 and RACE="..." are for `make train`; VERBOSE=1 shows what
# pip and the compilers say.

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
.PHONY: help train build test test-cpp test-cpp-beside test-deaths test-tsan test-asan test-checker test-python \
        test-bare test-user stress test-gpu test-torch test-clients judge test-emulator test-ptx kernels kernel-sweep lint format types compat packaging \
        wheels gpu-machine gpu-kit docs coverage bench clean distclean check-python

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

test-cpp:  ## run the C++ tests, those of SIMD code at each instruction set of this CPU
	@$(CPP) run

test-deaths: check-python  ## test that a rank is killed, stopped or replaced at every step of a group
	@RINGCOMM_DEATHS=all $(CPP) run ARGS="-tc=deaths*"
	@export RINGCOMM_DEATHS=all; $(PREPARE) --need train --need test --extension -- \
	    -m pytest tests/python/backend/test_message_deaths.py tests/python/device/test_device_deaths.py

test-tsan:  ## run the C++ tests under ThreadSanitizer (FORM=short: some)
	@$(CPP) run-tsan

test-asan:  ## run the C++ tests under AddressSanitizer and UBSan (FORM=short: some)
	@$(CPP) run-asan

test-checker: check-python  ## check every interleaving of the protocols, and that broken protocols are found
	@$(CPP) run-checker PYTHON="$(PYTHON)"

test-emulator: check-python  ## test the emulator of CUDA's driver, and compare its declarations with cuda.h
	@$(PREPARE) --need nvcc --no-torch
	@$(MAKE) --no-print-directory -C "$(ROOT)/tests/emulator" abi PYTHON="$(PYTHON)"
	@$(PREPARE) --need train --need test --extension -- \
	    -m pytest tests/python/device/test_emulator.py tests/python/device/test_emulator_on_cuda.py $(ARGS)

test-ptx: check-python  ## run nvcc's PTX of the CUDA kernels and Triton's on the CPU: some kernels, or all and broken ones (ARGS=all)
	@$(PREPARE) --need nvcc --no-torch
	@$(MAKE) --no-print-directory -C "$(ROOT)/tests/ptx" run FORM=$(or $(ARGS),short) ARGS= PYTHON="$(PYTHON)"
	@$(PREPARE) --need train --need test --extension -- -m pytest -q tests/python/ops/test_triton_ptx.py \
	    $(if $(filter all,$(ARGS)),,-k 'some_cases or newer')
	@export RINGCOMM_TEST_PTX=$(or $(ARGS),short); $(PREPARE) --need train --need test --extension -- -m pytest -q \
	    $(if $(filter all,$(ARGS)),tests/python/device/test_gpu_*.py) tests/python/device/test_device_losses.py

kernels: check-python  ## compile the CUDA kernels with nvcc, and compare their machine code with the table
	@$(PREPARE) --need nvcc --need test -- tools/cuda_kernels.py
	@$(PREPARE) --need test -- tests/sass/gate.py

# A kit (make gpu-kit) has it: nothing is compiled again there, whatever the times of files are.
kernel-sweep: check-python  ## build build/gpu/kernel_sweep, which times and verifies the CUDA kernels, and build/gpu/probe, without torch (HELD=8)
ifndef RINGCOMM_PREBUILT
	@cd "$(ROOT)" && "$(PYTHON)" tools/cuda_kernels.py $(HELD)
	@$(MAKE) --no-print-directory -C "$(ROOT)/benchmarks/gpu" HELD=$(HELD)
endif

test-python: check-python  ## run the Python tests (ARGS="-k name ...")
	@$(PREPARE) --need train --need test --extension -- -m pytest $(ARGS)

# What depends on the account: processes and files of others, PATH, HOME, namespaces.
USER_TESTS := $(addprefix tests/python/,programs/test_ordinary_user.py \
    backend/test_job_doctor.py::test_what_is_no_job_is_refused_in_one_line \
    backend/test_job_doctor.py::test_a_process_of_root_is_refused_in_one_line \
    backend/test_job_doctor.py::test_the_command_reads_the_job_of_a_launcher \
    backend/test_job_doctor.py::test_a_host_that_is_gone backend/test_leftovers.py::test_killed_ranks_leave_nothing \
    programs/test_benchmark_scripts.py::test_records_of_a_script[hosts] ops/test_linear_cross_entropy.py)
test-user: check-python  ## as root, run Python tests as an ordinary user from whom /proc hides other processes
	@$(PREPARE) --need train --need test --extension -- \
	    -c "import os, sys; os.execv('tools/ordinary_user', ['ordinary_user', sys.executable, *sys.argv[1:]])" \
	    $(or $(ARGS),-q $(USER_TESTS))

stress: check-python  ## run 10,000 random sequences of collectives, all sizes between hosts 20 times, each system call failing, then a soak and random training loops for 10 minutes each
	@RINGCOMM_HOSTS_ROUNDS="$${RINGCOMM_HOSTS_ROUNDS:-20}" $(CPP) run ARGS="-tc='hosts: shards on both sides*'"
	@export RINGCOMM_FAULTS="$${RINGCOMM_FAULTS:-1}" RINGCOMM_SEQUENCES="$${RINGCOMM_SEQUENCES:-10000}" \
	    RINGCOMM_SOAK_SECONDS="$${RINGCOMM_SOAK_SECONDS:-600}" \
	    RINGCOMM_LOOPS_SECONDS="$${RINGCOMM_LOOPS_SECONDS:-600}"; $(PREPARE) --need train --need test --extension -- \
	    -m pytest -s tests/python/backend/test_random_sequences.py \
	    tests/python/backend/test_failing_calls.py tests/python/backend/test_soak.py \
	    tests/python/training/test_random_loops.py $(ARGS)

BARE_TESTS := $(addprefix tests/python/,programs/test_without_optional.py \
    offload/test_file_store_crashes.py training/test_zero_calls.py offload/test_weight_shards.py \
    parameter_server/test_parameter_server_calls.py expert/test_mixture_of_experts.py)
test-bare: check-python  ## run Python tests without the optional packages
	@cd "$(ROOT)" && PYTHONPATH="$(ROOT)/tests/bare" "$(PYTHON)" tools/bootstrap.py --need train --need test \
	    --extension -- -m pytest $(BARE_TESTS) $(ARGS)

test-gpu: export RINGCOMM_CUDA := 1
test-gpu: check-python  ## run the GPU tests in each layout of ranks that this machine supports (LAYOUT=one-2-mps)
	@$(PREPARE) --need train --need test --extension -- tools/verify_gpu.py --layout $(or $(LAYOUT),every) $(ARGS)

test-torch: check-python  ## run PyTorch's own distributed tests (ARGS="--mode gloo-2 --test 'test_all*'")
	@$(PREPARE) --need train --need test --extension -- tests/torch/run.py $(ARGS)

judge: check-python  ## put faults into copies of the checkout, and say which of them the quick tests notice (ARGS="--kind python")
	@$(PREPARE) --need train --need test --extension -- -m tests.judge.run $(ARGS)

test-clients: check-python  ## run programs of other projects over Gloo and over ringcomm, and compare them (ARGS="--short")
	@$(PREPARE) --need train --need test --extension -- tests/clients/run_clients.py $(ARGS)

# Every check runs, also after one has failed. The tools are beside the prepared Python.
LINT = status=0; \
    ruff check $(1) . || status=1; \
    ruff format -q $(2) . || status=1; \
    find csrc kernels tests/cpp tests/emulator tests/ptx benchmarks/gpu -not -path '*/third_party/*' \
        '(' -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' ')' -print0 \
        | xargs -0 clang-format $(3) || status=1; \
    exit $$status
LINTED := $(PREPARE) --need lint --no-torch -- -c 'import os, sys; \
    os.environ["PATH"] = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]; \
    os.execvp("sh", ["sh", "-c", os.environ["LINT_COMMAND"]])'
lint: export LINT_COMMAND = $(call LINT,,--check,--dry-run -Werror -ferror-limit=1)
lint: check-python  ## check the code with ruff and clang-format
	@$(LINTED)

format: export LINT_COMMAND = $(call LINT,--fix,,-i)
format: check-python  ## format the code with ruff and clang-format
	@$(LINTED)

# Examples have scripts of the same names as benchmarks. Both are checked, also after one has failed.
TYPED := $(PREPARE) --need lint --need train --need test -- -m mypy
types: check-python  ## check the types with mypy
	@status=0; $(TYPED) ringcomm kernels benchmarks tools tests _ringcomm noxfile.py || status=1; \
	$(TYPED) examples || status=1; exit $$status

# nox skips what has no Python here, but is strict where CI is set: each target says which it wants.
NOX := $(PREPARE) --no-torch --need nox -- -m nox -s
compat: check-python  ## run a short set of tests with torch 2.11 and with the newest torch (ARGS=2.14)
	@$(NOX) compat $(if $(ARGS),-- $(ARGS))

gpu-kit: check-python  ## build the folder gpu-kit for a machine with a GPU, where gpu-kit/run 1 to gpu-kit/run 5 use it
	@$(PREPARE) --need nvcc --no-torch
	@$(NOX) gpu --error-on-missing-interpreters -- kit

gpu-machine: check-python  ## build and test without a GPU what a GPU machine would use: torch 2.11 for CUDA, kernels for sm_90
	@$(PREPARE) --need nvcc --no-torch
	@$(NOX) gpu $(if $(CI),,--no-error-on-missing-interpreters)

packaging: check-python  ## build the sdist and the wheel, and test the wheel in a fresh environment
	@$(PREPARE) --need train --need nox --extension -- -m nox -s packaging

wheels: check-python  ## build a wheel for each Python that is here, for torch 2.13, 2.14 and 2.15, in dist (ARGS="--python 3.12 -- 2.13")
	@$(NOX) part wheels wheels_made --$(if $(ARGS),,no-)error-on-missing-interpreters $(ARGS)

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

clean:  ## remove what was built, except .venv and .cache
	@cd "$(ROOT)" && rm -rf build dist sdist *.egg-info ringcomm/_*.so .pytest_cache .mypy_cache \
	    .ruff_cache && find ringcomm kernels examples benchmarks tools tests -name __pycache__ \
	    -type d -prune -exec rm -rf {} +

distclean: clean  ## remove what was built, .venv and .cache
	@cd "$(ROOT)" && rm -rf .venv .cache

check-python:
	@command -v "$(PYTHON)" >/dev/null || { echo "ringcomm: $(PYTHON) is not on PATH. Install" \
	    "it: apt-get install python3 python3-venv python3-dev; or name one: make PYTHON=..."; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "ringcomm:" \
	    "Python >= 3.10 is needed; $(PYTHON) is $$("$(PYTHON)" --version 2>&1). Install a newer" \
	    "one, and name it: make PYTHON=python3.12"; exit 1; }
