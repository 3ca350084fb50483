// Accesses of blocks to the weak memory: which of them mutants make weaker, and when stores are
// made early.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "ptx/early_stores.h"
#include "ptx/machine.h"
#include "ptx/weak_memory.h"

namespace ringcomm::ptx::weak {
namespace {

const char* setting(const char* name) {
  const char* const text = std::getenv(name);
  return text != nullptr && *text != '\0' ? text : nullptr;
}

WeakMemory& memory() {
  // Never destroyed: kernels may run while the process ends.
  static auto& memory =
      *new WeakMemory(std::strtoull(setting("RINGCOMM_TEST_PTX_MEMORY"), nullptr, 10));
  return memory;
}

constexpr std::chrono::milliseconds kTimeToSeeEarlyStore{100}, kTimeOfSkippedBarrier{8},
    kTimeOfLastStores{3};

// ---- mutants

struct Mutant {
  std::string kernel;
  std::map<u32, std::string> changes;  // by line
  bool makes_early = false;            // whether a release or an acquire lost its order

  /// "" for a line that stays as it is.
  const std::string& change_of(u32 line) const {
    static const std::string none;
    const auto found = changes.find(line);
    return found == changes.end() ? none : found->second;
  }
};

Mutant read_mutant() {
  const char* const text = setting("RINGCOMM_TEST_PTX_MUTANT");
  if (text == nullptr) return {};
  Mutant mutant;
  std::istringstream parts(text);
  std::string line, change;
  std::getline(parts, mutant.kernel, ':');
  while (std::getline(parts, line, '=') && std::getline(parts, change, ',')) {
    mutant.changes[static_cast<u32>(std::strtoul(line.c_str(), nullptr, 10))] = change;
    mutant.makes_early = mutant.makes_early || change == "relaxed" || change == "gpu";
  }
  return mutant;
}

/// The order and scope of an instruction after the change.
struct Strength {
  Order order;
  Scope scope;
};

Strength weakened(const std::string& change, Strength strength) {
  if (change == "weak") return {Order::kWeak, strength.scope};
  if (change == "relaxed") return {Order::kRelaxed, strength.scope};
  if (change == "cta") return {strength.order, Scope::kCta};
  if (change == "cluster") return {strength.order, Scope::kCluster};
  if (change == "gpu") return {strength.order, Scope::kGpu};
  std::fprintf(stderr, "ptx: RINGCOMM_TEST_PTX_MUTANT has no change %s\n", change.c_str());
  std::abort();
}

// ---- executed lines

class Lines {
 public:
  static Lines& all() {
    static auto& lines = *new Lines;
    return lines;
  }
  bool is_wanted() const { return file_ != nullptr; }
  void add(const char* kernel, const std::set<u32>& executed) {
    const std::lock_guard lock(mutex_);
    for (const u32 line : executed)
      if (known_.emplace(kernel, line).second) {
        std::fprintf(file_, "%s %u\n", kernel, line);
        std::fflush(file_);
      }
  }

 private:
  std::mutex mutex_;
  std::set<std::pair<std::string, u32>> known_;
  std::FILE* const file_ = setting("RINGCOMM_TEST_PTX_LINES") == nullptr
                               ? nullptr
                               : std::fopen(setting("RINGCOMM_TEST_PTX_LINES"), "a");
};

// ---- blocks

/// Threads with the same tid.y have barriers of their own, as if they were a block.
struct Accesses final : Memory {
  explicit Accesses(const Launch& launch) : Memory(true), kernel(launch.kernel->name) {
    static const Mutant known = read_mutant();
    if (known.kernel == launch.kernel->name) mutant = &known;
    static std::atomic<u64> next_block = 0;
    const u64 block = next_block++;
    // Blocks of a cluster have their array of shared memories in common.
    const Place place{launch.gpu, reinterpret_cast<u64>(launch.cluster_shared), block};
    part_threads = launch.ntid.x;
    for (u32 y = 0; y < launch.ntid.y * launch.ntid.z; ++y)
      parts.push_back(memory().begin_block(place, part_threads));
  }
  ~Accesses() override {
    early.end();
    // What a block has not released may become visible long after it has told that it has ended.
    if (parts[0]->random() % 4 == 0) std::this_thread::sleep_for(kTimeOfLastStores);
    for (const auto& part : parts) memory().end_block(*part);
    if (Lines::all().is_wanted()) Lines::all().add(kernel, executed);
  }

  WeakThread& state_of(const Thread& thread) {
    return parts[thread.linear / part_threads]->threads[thread.linear % part_threads];
  }
  /// The thread itself, or what its bulk copies are done by.
  WeakThread& state_of(const Thread& thread, Proxy proxy) {
    WeakThread& issuer = state_of(thread);
    if (proxy == Proxy::kGeneric) return issuer;
    WeakThread& copier = issuer.block->copier;
    copier.view = join(copier.view, issuer.async_view);
    return copier;
  }
  Strength strength_of(Strength written, u32 line) {
    if (written.order != Order::kWeak && Lines::all().is_wanted()) executed.insert(line);
    const std::string& change = change_of(line);
    return change.empty() ? written : weakened(change, written);
  }
  bool orders_nothing(u32 line) {
    if (Lines::all().is_wanted()) executed.insert(line);
    return change_of(line) == "none";
  }

  const char* const kernel;
  std::set<u32> executed;
  const Mutant* mutant = nullptr;
  const std::string& change_of(u32 line) const {
    static const Mutant none;
    return (mutant != nullptr ? *mutant : none).change_of(line);
  }
  bool makes_early() const { return mutant != nullptr && mutant->makes_early; }
  bool stores_cursor(const Access& access) const {
    return access.num_bytes() == sizeof(u64) && access.order == Order::kRelease;
  }
  /// Whether a store may take effect before earlier loads, for some of those who see it.
  bool may_be_early(const Access& access, u64 address) const {
    if (const std::string& change = change_of(access.line); !change.empty())
      return change == "relaxed";
    return WeaklyAcquired::all().has_another(address, parts[0]->place.gpu);
  }

  void load(Thread& thread, u64 address, void* to, const Access& access) override;
  void store(Thread& thread, u64 address, const void* from, const Access& access) override;
  u64 atomic(Thread& thread, u64 address, const Access& access,
             const std::function<u64(u64)>& update) override;
  void fence(Thread& thread, Order order, Scope scope, u32 line) override;
  void fence_proxy(Thread& thread, u32 line) override;
  void fence_mbarrier_init(Thread& thread, u32 line) override;
  bool orders_nothing(const Thread&, u32 line) override { return orders_nothing(line); }
  bool skips(const Thread& thread, u32 line) override;
  void pass(Thread& thread, Barrier barrier, u32 num_threads, Order order) override;
  void arrive_at_cluster(Thread& thread, Order order) override;
  void at_mbarrier(Thread& thread, u64 address, MbarrierEvent event, Order order,
                   Scope scope) override;

  EarlyStores early;
  u32 part_threads = 0;
  std::vector<std::unique_ptr<WeakBlock>> parts;
};

/// Calls access(offset, bytes) for each part of at most 8 bytes.
template <class F>
void for_each_part(const Access& access, const F& call) {
  const u32 size = std::min<u32>(access.element_bytes, 8);
  for (u32 offset = 0; offset < access.num_bytes(); offset += size) call(offset, size);
}

void Accesses::load(Thread& thread, u64 address, void* to, const Access& access) {
  const Strength strength = strength_of({access.order, access.scope}, access.line);
  WeakThread& state = state_of(thread, access.proxy);
  if (makes_early()) {
    if (access.order == Order::kAcquire) {
      if (!change_of(access.line).empty())
        WeaklyAcquired::all().add(address, state.block->place.gpu);
      early.acquired(thread.linear, address);
    }
    const auto is_wanted = [&](u64 to) {
      WeaklyAcquired& all = WeaklyAcquired::all();
      return all.is_empty() || all.has_another(to, state.block->place.gpu);
    };
    const auto early_store = [&](u32 linear, u64 to, u64 value) {
      const auto& part = parts[linear / part_threads];
      WeakThread& storing = part->threads[linear % part_threads];
      const bool releases = WeaklyAcquired::all().has_another(to, part->place.gpu);
      memory().store_early(storing, to, value, releases);
    };
    if (access.order == Order::kWeak && !access.is_shared &&
        early.make_one(state.block->random(), is_wanted, early_store))
      std::this_thread::sleep_for(kTimeToSeeEarlyStore);
  }
  for_each_part(access, [&](u32 offset, u32 size) {
    const u64 value = memory().load(state, address + offset, size, strength.order, strength.scope);
    std::memcpy(static_cast<char*>(to) + offset, &value, size);
  });
}

void Accesses::store(Thread& thread, u64 address, const void* from, const Access& access) {
  const Strength strength = strength_of({access.order, access.scope}, access.line);
  WeakThread& state = state_of(thread, access.proxy);
  if (makes_early() && stores_cursor(access)) {
    u64 value = 0;
    std::memcpy(&value, from, sizeof value);
    if (early.is_made(thread.linear, address, value, may_be_early(access, address)))
      return memory().release_early(state, address, strength.order, strength.scope);
  }
  for_each_part(access, [&](u32 offset, u32 size) {
    u64 value = 0;
    std::memcpy(&value, static_cast<const char*>(from) + offset, size);
    memory().store(state, address + offset, value, size, strength.order, strength.scope,
                   access.is_shared);
  });
}

u64 Accesses::atomic(Thread& thread, u64 address, const Access& access,
                     const std::function<u64(u64)>& update) {
  const Strength strength = strength_of({access.order, access.scope}, access.line);
  return memory().update(state_of(thread), address, access.element_bytes, strength.order,
                         strength.scope, update);
}

void Accesses::fence(Thread& thread, Order order, Scope scope, u32 line) {
  if (orders_nothing(line)) return;
  const Strength strength = strength_of({order, scope}, line);
  memory().fence(state_of(thread), strength.order, strength.scope);
}

void Accesses::fence_proxy(Thread& thread, u32 line) {
  if (!orders_nothing(line)) memory().fence_proxy(state_of(thread));
}

void Accesses::fence_mbarrier_init(Thread& thread, u32 line) {
  if (!orders_nothing(line)) memory().fence(state_of(thread), Order::kRelease, Scope::kCluster);
}

bool Accesses::skips(const Thread& thread, u32 line) {
  if (change_of(line) != "skip") return false;
  // Other blocks may do much before the next thread of this one runs.
  if (state_of(thread).block->random() % 256 == 0)
    std::this_thread::sleep_for(kTimeOfSkippedBarrier);
  return true;
}

void Accesses::arrive_at_cluster(Thread& thread, Order order) {
  const Strength strength = strength_of({order, Scope::kCluster}, thread.line);
  memory().arrive_at_cluster(state_of(thread), strength.order);
}

void Accesses::at_mbarrier(Thread& thread, u64 address, MbarrierEvent event, Order order,
                           Scope scope) {
  WeakThread& state = state_of(thread);
  if (event == MbarrierEvent::kInit) return memory().init_mbarrier(state, address);
  if (!memory().knows_mbarrier(state, address))
    fail(thread, thread.line, "an mbarrier that need not be initialized for this thread");
  if (event == MbarrierEvent::kComplete)
    return memory().arrive_at_mbarrier(state.block->copier, address, order, scope);
  const Strength strength = strength_of({order, scope}, thread.line);
  if (event == MbarrierEvent::kPass)
    memory().pass_mbarrier(state, address, strength.order, strength.scope);
  else
    memory().arrive_at_mbarrier(state, address, strength.order, strength.scope);
}

void Accesses::pass(Thread& thread, Barrier barrier, u32 num_threads, Order order) {
  WeakThread& state = state_of(thread);
  if (barrier == Barrier::kCluster) {
    const Strength strength = strength_of({order, Scope::kCluster}, thread.line);
    return memory().pass_cluster(state, strength.order);
  }
  if (orders_nothing(thread.line)) return;
  if (barrier == Barrier::kWarp) {
    // The lanes of other masks would have to be known.
    if (num_threads == 32) state.block->pass_warp_barrier(state);
    return;
  }
  if (num_threads != part_threads)
    fail(thread, thread.line, "the weak memory has no barriers of %u threads", num_threads);
  const bool is_first = state.block->pass_barrier(state);
  if (is_first && makes_early()) early.passed_barrier();
}

}  // namespace

std::unique_ptr<Memory> begin_block(const Launch& launch) {
  static const bool is_chosen = setting("RINGCOMM_TEST_PTX_MEMORY") != nullptr;
  return is_chosen ? std::make_unique<Accesses>(launch) : nullptr;
}
void forget_stores() {
  if (setting("RINGCOMM_TEST_PTX_MEMORY") != nullptr) memory().forget();
}

}  // namespace ringcomm::ptx::weak
