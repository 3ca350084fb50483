// The kernels of benchmarks/gpu/probe as functions of the host. It has no multiprocessors: they all
// have number 0.
#include <atomic>
#include <chrono>
#include <thread>

#include "emulator/kernel_registry.h"
#include "gpu/probe/work.h"

namespace ringcomm::emulator {
namespace {

using probe::Work;

std::uint64_t load(std::uint64_t& word) {
  return std::atomic_ref(word).load(std::memory_order_acquire);
}
void store(std::uint64_t& word, std::uint64_t value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}
std::uint64_t now_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(since).count());
}

void hold(const Kernel&, const void* parameter, BlockContext& context) {
  const auto& work = *static_cast<const Work*>(parameter);
  probe::Words::Block& block = work.words->blocks[context.block_idx];
  store(block.began_ns, now_ns());
  store(block.multiprocessor, 0);
  store(block.number, 0);
  store(work.words->has_started, 1);
  std::this_thread::sleep_for(std::chrono::nanoseconds(work.limit_ns));
  store(block.ended_ns, now_ns());
}

void follow(const Kernel&, const void* parameter, BlockContext&) {
  const auto& work = *static_cast<const Work*>(parameter);
  const std::uint64_t began = now_ns();
  store(work.words->has_started, 1);
  std::uint64_t address = 0;
  while ((address = load(work.words->address)) == 0) {
    if (now_ns() - began >= work.limit_ns) return;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  store(work.words->value, *reinterpret_cast<const std::uint32_t*>(address));
  store(work.words->has_read, 1);
}

void cluster(const Kernel&, const void* parameter, BlockContext& context) {
  const auto& work = *static_cast<const Work*>(parameter);
  context.meet_cluster();
  store(work.words->blocks[context.block_idx].number, context.cluster_blocks);
}

constexpr Kernel kKernels[] = {{"probe_hold", sizeof(Work), hold},
                               {"probe_follow", sizeof(Work), follow},
                               {"probe_cluster", sizeof(Work), cluster}};

}  // namespace

const Kernel* find_probe_kernel(std::string_view name) {
  for (const Kernel& kernel : kKernels)
    if (kernel.name == name) return &kernel;
  return nullptr;
}

}  // namespace ringcomm::emulator
