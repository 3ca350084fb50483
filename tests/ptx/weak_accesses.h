#pragma once

#include <functional>
#include <memory>

#include "ptx/memory.h"

/// The functions of memory.h on the weak memory (weak_memory.h), where RINGCOMM_TEST_PTX_MEMORY has
/// its seed. It is of one process: what another process has stored is seen at once, and what this
/// one stores is seen there late.
///
/// RINGCOMM_TEST_PTX_MUTANT=KERNEL:LINES:CHANGE makes the instructions in these lines (a comma
/// between two) of a kernel's PTX weaker: "weak", "relaxed", "cta", "cluster" or "gpu" in place of
/// their order or scope. "none" is a fence that orders nothing, and a barrier at which threads meet
/// without order; "skip" a barrier that is not there. RINGCOMM_TEST_PTX_LINES=FILE gets the kernel
/// and line of every instruction that could be weakened and was executed.
namespace ringcomm::ptx::weak {

bool is_chosen();

void load(Thread& thread, u64 address, void* to, const Access& access);
void store(Thread& thread, u64 address, const void* from, const Access& access);
u64 atomic(Thread& thread, u64 address, const Access& access,
           const std::function<u64(u64)>& update);
void fence(Thread& thread, Order order, Scope scope, u32 line);
void fence_proxy(Thread& thread, u32 line);
void fence_mbarrier_init(Thread& thread, u32 line);
bool orders_nothing(const Thread& thread, u32 line);
/// Whether a mutant leaves out the barrier in this line.
bool skips(const Thread& thread, u32 line);
void pass(Thread& thread, Barrier barrier, u32 num_threads, Order order);
void arrive_at_cluster(Thread& thread, Order order);
void at_mbarrier(Thread& thread, u64 address, MbarrierEvent event, Order order, Scope scope);
std::unique_ptr<BlockMemory> begin_block(const Launch& launch);

}  // namespace ringcomm::ptx::weak
