# What is compiled, and with which flags: the Makefiles of the C++ tests, the emulator, the PTX machine and
# the programs for a GPU include this file, and tools/buildconfig.py reads its lines "NAME := WORDS" for the
# extension. Folders and files are from the root of the checkout.

# Contraction is off so that a sum rounds the same way on every machine and SIMD level, and on GPUs.
CXX_COMMON := -std=c++20 -ffp-contract=off -Wall
NVCC_COMMON := -std=c++20 --expt-relaxed-constexpr -fmad=false
# GCC frees memory from some ten MiB on, which takes a tenth of the time.
GCC_ALONE := --param=ggc-min-heapsize=524288
INCLUDED := csrc .
# Joined into a few units, which parse the headers that they share once.
ENGINE := csrc/core csrc/host csrc/collectives csrc/transport csrc/communicator
# Compiled one by one: a level of SIMD begins with its own flags.
KERNELS_ALONE := kernels/common kernels/reductions kernels/updates/update_op.cc
GPU := csrc/cuda/driver csrc/cuda/collectives

SANITIZER_tsan := -fsanitize=thread
SANITIZER_asan := -fsanitize=address,undefined -fno-sanitize-recover=undefined
SANITIZER_coverage := --coverage

# For make alone. A Makefile has set VARIANT, and OUT by "="; LABEL and OWN_FLAGS may follow.
ROOT := $(abspath $(dir $(lastword $(MAKEFILE_LIST)))/..)
PYTHON ?= python3
JOBS := $(or $(RINGCOMM_MAX_JOBS),$(MAX_JOBS),$(shell nproc))
ifeq ($(origin CXX),default)
CXX := c++
endif
IS_CLANG := $(findstring clang,$(shell $(CXX) --version 2>/dev/null))
FLAGS := $(CXX_COMMON) -Wextra $(if $(filter-out 0,$(RINGCOMM_WERROR)),-Werror) $(if $(IS_CLANG),,$(GCC_ALONE)) -pthread \
    $(addprefix -I$(ROOT)/,$(INCLUDED) tests benchmarks)
FOR_LIBRARY := -fPIC -fvisibility=hidden
# The sources of folders and files.
sources = $(sort $(foreach one,$(addprefix $(ROOT)/,$(1)),$(if $(filter %.cc,$(one)),$(one),$(shell find $(one) -name '*.cc'))))
# Objects have their source's path below OUT, with header dependencies, so that a second run compiles little.
objects = $(patsubst $(ROOT)/%.cc,$(OUT)/%.o,$(1))
command = $(CXX) $(FLAGS) $(SANITIZER_$(VARIANT)) $(OWN_FLAGS) $(CXXFLAGS)
compile = $(command) -MMD -MP -MT $@ -c $< -o $@
link = $(CXX) $(SANITIZER_$(VARIANT)) -pthread $(CXXFLAGS)
nvcc = $(shell $(PYTHON) -c "import sys; sys.path.insert(0, '$(ROOT)/tools'); import buildconfig; print(buildconfig.find_nvcc() or '')")

# A change of flags or compiler rebuilds: the file changes only when its text does.
$(OUT)/flags: FORCE
	@mkdir -p $(OUT); echo '$(command)' | cmp -s - $@ || echo '$(command)' >$@
$(OUT)/%.o: $(ROOT)/%.cc $(OUT)/flags
	@mkdir -p $(@D); echo "  $(LABEL): $*.cc"
	@$(compile)
FORCE:
