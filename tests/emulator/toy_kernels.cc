// Kernels for the tests of the emulator itself, and their parameters.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "emulator/kernel_registry.h"
#include "emulator/toy_parameters.h"

namespace ringcomm::emulator {
namespace {

/// "toy_meet": every block adds one to `num_arrived`, spins until all blocks of the grid have, or
/// for `limit_ms`, and adds one to `num_met` in the first case.
struct ToyMeet {
  std::uint32_t* num_arrived = nullptr;
  std::uint32_t* num_met = nullptr;
  std::uint32_t limit_ms = 0;
};

/// "toy_threads": each thread t of block b stores t + 1 in a slot of the block, and after sync()
/// the first one stores their sum in sums[b].
struct ToyThreads {
  std::int32_t* slots = nullptr;  // num_threads of each block
  std::int32_t* sums = nullptr;
};

/// "toy_pass" waits until the flag is 3, stores `number` by a plain store, sets the flag to 1, by a
/// release unless it `forgets`, and runs until it is 2. "toy_take" loads the number by a plain
/// load, sets the flag to 3, waits until it is 1, by acquires unless it `forgets`, loads the number
/// again, stores it after the first one, and sets the flag to 2.
struct ToyPass {
  std::int32_t* data = nullptr;
  std::uint32_t* flag = nullptr;
  std::int32_t number = 0;
  std::uint32_t forgets = 0;
  std::uint32_t limit_ms = 0;
};

template <class Condition>
bool spin(std::uint32_t limit_ms, Condition condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(limit_ms);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

template <class Change>
void for_my_elems(const ToyAdd& p, const BlockContext& context, Change change) {
  const std::int64_t stride = std::int64_t{context.num_threads} * context.num_blocks;
  for (std::int64_t i = std::int64_t{context.block_idx} * context.num_threads + context.thread_idx;
       i < p.num_elems; i += stride)
    change(p.to[i]);
}

void add(const void* parameter, BlockContext& context) {
  const auto& p = *static_cast<const ToyAdd*>(parameter);
  for_my_elems(p, context, [&](std::int32_t& elem) { elem += p.number; });
}

void scale(const void* parameter, BlockContext& context) {
  const auto& p = *static_cast<const ToyScale*>(parameter);
  for_my_elems(p, context, [&](std::int32_t& elem) { elem *= p.number; });
}

void signal(const void* parameter, BlockContext& context) {
  const auto& p = *static_cast<const ToySignal*>(parameter);
  if (context.thread_idx == 0) std::atomic_ref(*p.flag).store(p.value);
}

void await(const void* parameter, BlockContext& context) {
  const auto& p = *static_cast<const ToyAwait*>(parameter);
  if (context.thread_idx != 0) return;
  if (p.num_running != nullptr) ++std::atomic_ref(*p.num_running);
  const bool came = spin(p.limit_ms, [&] { return std::atomic_ref(*p.flag).load() == p.value; });
  if (!came && p.num_gave_up != nullptr) ++std::atomic_ref(*p.num_gave_up);
}

void meet(const void* parameter, BlockContext& context) {
  const auto& p = *static_cast<const ToyMeet*>(parameter);
  if (context.thread_idx != 0) return;
  std::atomic_ref arrived(*p.num_arrived);
  ++arrived;
  if (spin(p.limit_ms, [&] { return arrived.load() == context.num_blocks; }))
    ++std::atomic_ref(*p.num_met);
}

void threads(const void* parameter, BlockContext& context) {
  const auto& p = *static_cast<const ToyThreads*>(parameter);
  std::int32_t* slots = p.slots + std::size_t{context.block_idx} * context.num_threads;
  slots[context.thread_idx] = static_cast<std::int32_t>(context.thread_idx) + 1;
  context.sync();
  if (context.thread_idx != 0) return;
  p.sums[context.block_idx] = 0;
  for (unsigned i = 0; i < context.num_threads; ++i) p.sums[context.block_idx] += slots[i];
}

void pass(const void* parameter, BlockContext& context) {
  const auto& p = *static_cast<const ToyPass*>(parameter);
  const PlainAccesses plain(context);
  const std::atomic_ref flag(*p.flag);
  spin(p.limit_ms, [&] { return flag.load() == 3; });
  store_plain(p.data, p.number);
  if (p.forgets == 0) plain.release();
  flag.store(1);
  spin(p.limit_ms, [&] { return flag.load() == 2; });
}

void take(const void* parameter, BlockContext& context) {
  const auto& p = *static_cast<const ToyPass*>(parameter);
  const PlainAccesses plain(context);
  const std::atomic_ref flag(*p.flag);
  load_plain<std::int32_t>(p.data);
  flag.store(3);
  spin(p.limit_ms, [&] { return flag.load() == 1; });
  if (p.forgets == 0) plain.acquire();
  const auto number = load_plain<std::int32_t>(p.data);
  std::atomic_ref(p.data[1]).store(number);
  flag.store(2);
}

constexpr Kernel kKernels[] = {
    {"toy_add", sizeof(ToyAdd), &add},          {"toy_scale", sizeof(ToyScale), &scale},
    {"toy_signal", sizeof(ToySignal), &signal}, {"toy_await", sizeof(ToyAwait), &await},
    {"toy_meet", sizeof(ToyMeet), &meet},       {"toy_threads", sizeof(ToyThreads), &threads},
    {"toy_pass", sizeof(ToyPass), &pass},       {"toy_take", sizeof(ToyPass), &take},
};

}  // namespace

const Kernel* find_kernel(std::string_view name) {
  for (const Kernel& kernel : kKernels)
    if (name == kernel.name) return &kernel;
  return nullptr;
}

}  // namespace ringcomm::emulator
