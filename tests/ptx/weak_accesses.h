#pragma once

#include <memory>

#include "ptx/memory.h"

/// A block's accesses to the weak memory (weak_memory.h), where RINGCOMM_TEST_PTX_MEMORY has its
/// seed; else null. It is of one process: what another process has stored is seen at once, and what
/// this one stores is seen there late.
///
/// RINGCOMM_TEST_PTX_MUTANT=KERNEL:LINE=CHANGE,... makes instructions in these lines of a kernel's
/// PTX weaker: "weak", "relaxed", "cta", "cluster" or "gpu" in place of their order or scope.
/// "none" is a fence that orders nothing, and a barrier at which threads meet without order; "skip"
/// a barrier that is not there. RINGCOMM_TEST_PTX_LINES=FILE gets the kernel and line of every
/// instruction that could be weakened and was executed.
namespace ringcomm::ptx::weak {

std::unique_ptr<Memory> begin_block(const Launch& launch);
/// Between two groups of ranks, whose memory may be the same.
void forget_stores();

}  // namespace ringcomm::ptx::weak
