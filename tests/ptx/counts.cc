#include "ptx/counts.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "ptx/machine.h"

namespace ringcomm::ptx {
namespace {

constexpr u32 kLanes = 32, kSectorBytes = 32, kBankBytes = 4;
// Lanes that poll may be many turns ahead.
constexpr std::size_t kMaxOpen = 8192;

std::atomic<bool> is_counting = false;
std::mutex counts_mutex;
Counts all_counts;

Counted kind_of(const Access& access, bool is_store) {
  const auto either = [is_store](Counted load, Counted store) { return is_store ? store : load; };
  if (access.is_shared) return either(Counted::kSharedLoad, Counted::kSharedStore);
  if (access.proxy == Proxy::kAsync) return either(Counted::kBulkLoad, Counted::kBulkStore);
  if (access.order == Order::kWeak) return either(Counted::kLoad, Counted::kStore);
  if (access.order == Order::kVolatile) return either(Counted::kPacketLoad, Counted::kPacketStore);
  return is_store && access.order == Order::kRelease ? Counted::kPublish : Counted::kPoll;
}

/// What the lanes of a warp access together, each `bytes`.
struct Together {
  std::array<u64, kLanes> addresses = {};
  u32 lanes = 0;  // a bit each
  u32 bytes = 0;

  bool has(u32 lane) const { return (lanes >> lane & 1) != 0; }

  Count in_global() const {
    std::set<u64> distinct, sectors;
    Count count{.num = 1};
    for (u32 lane = 0; lane < kLanes; ++lane) {
      if (!has(lane) || !distinct.insert(addresses[lane]).second) continue;
      count.bytes += bytes;
      for (u64 at = addresses[lane] / kSectorBytes;
           at <= (addresses[lane] + bytes - 1) / kSectorBytes; ++at)
        sectors.insert(at);
    }
    count.sectors = sectors.size();
    const u64 touched = count.sectors * kSectorBytes;
    // A scalar that all lanes load is not data.
    if (lanes == ~0u && distinct.size() > 1 && touched > count.bytes)
      count.wasted = touched - count.bytes;
    return count;
  }

  /// Of wide elements a half or a quarter of the warp goes at a time. Lanes that want the same word
  /// get it together; different words of a bank follow each other.
  Count in_shared() const {
    Count count{.num = 1};
    const u32 at_once = kLanes * kBankBytes / std::max(bytes, kBankBytes);
    for (u32 first = 0; first < kLanes; first += at_once) {
      std::array<std::set<u64>, kLanes> words;
      for (u32 lane = first; lane < first + at_once; ++lane) {
        if (!has(lane)) continue;
        count.bytes += bytes;
        for (u64 word = addresses[lane] / kBankBytes;
             word <= (addresses[lane] + bytes - 1) / kBankBytes; ++word)
          words[word % kLanes].insert(word);
      }
      std::size_t most = 0;
      for (const auto& of_bank : words) most = std::max(most, of_bank.size());
      count.sectors += most;
      if (most > 1) count.wasted += most - 1;
    }
    return count;
  }
};

/// Barriers that a thread has passed, and how often it has executed each line since.
struct Lane {
  u32 barriers = 0;
  std::map<std::pair<u32, Counted>, u32> executed = {};
};

struct CountedBlock final : Memory {
  explicit CountedBlock(const Launch& launch)
      : Memory(true),
        kernel(launch.kernel->name),
        lanes(launch.ntid.count()),
        warps((lanes.size() + kLanes - 1) / kLanes) {}
  ~CountedBlock() override {
    for (auto& open : warps)
      while (!open.empty()) close(open, open.begin());
    const std::lock_guard lock(counts_mutex);
    for (const auto& [line, count] : counts) all_counts[{kernel, line.first, line.second}] += count;
  }

  // Barriers passed, line, what, execution since the barrier.
  using Key = std::tuple<u32, u32, Counted, u32>;
  using Open = std::map<Key, Together>;

  void close(Open& open, Open::iterator at) {
    const auto& [barriers, line, what, execution] = at->first;
    const bool is_shared = what == Counted::kSharedLoad || what == Counted::kSharedStore;
    counts[{line, what}] += is_shared ? at->second.in_shared() : at->second.in_global();
    open.erase(at);
  }

  void load(Thread& thread, u64 address, void* to, const Access& access) override {
    count(thread, address, access, false);
    Memory::load(thread, address, to, access);
  }
  void store(Thread& thread, u64 address, const void* from, const Access& access) override {
    count(thread, address, access, true);
    Memory::store(thread, address, from, access);
  }
  u64 atomic(Thread& thread, u64 address, const Access& access,
             const std::function<u64(u64)>& update) override {
    count(thread, address, access, true);
    return Memory::atomic(thread, address, access, update);
  }
  void pass(Thread& thread, Barrier barrier, u32, Order) override {
    if (barrier == Barrier::kBlock && thread.tid.x == 0)
      counts[{thread.line, Counted::kBarrier}] += {.num = 1};
    Lane& lane = lanes[thread.linear];
    ++lane.barriers;
    lane.executed.clear();
  }

  void count(const Thread& thread, u64 address, const Access& access, bool is_store) {
    const Counted what = kind_of(access, is_store);
    const u32 num_bytes = access.num_bytes();
    // By one thread alone.
    if (access.proxy == Proxy::kAsync || what == Counted::kPoll || what == Counted::kPublish) {
      const u64 num_sectors =
          (address % kSectorBytes + num_bytes + kSectorBytes - 1) / kSectorBytes;
      counts[{access.line, what}] += {1, num_bytes, num_sectors, 0};
      return;
    }
    Lane& lane = lanes[thread.linear];
    Open& open = warps[thread.linear / kLanes];
    const u32 execution = lane.executed[{access.line, what}]++;
    const auto at = open.try_emplace({lane.barriers, access.line, what, execution}).first;
    Together& together = at->second;
    together.addresses[thread.lane()] = address;
    together.bytes = num_bytes;
    together.lanes |= 1u << thread.lane();
    if (together.lanes == ~0u) close(open, at);
    if (open.size() > kMaxOpen) close(open, open.begin());
  }

  const char* const kernel;
  std::vector<Lane> lanes;
  std::vector<Open> warps;
  std::map<std::pair<u32, Counted>, Count> counts;
};

}  // namespace

Count& Count::operator+=(const Count& other) {
  num += other.num;
  bytes += other.bytes;
  sectors += other.sectors;
  wasted += other.wasted;
  return *this;
}

Count total(const Counts& counts, Counted what) {
  Count sum;
  for (const auto& [line, count] : counts)
    if (line.what == what) sum += count;
  return sum;
}

void start_counting() {
  all_counts.clear();
  is_counting = true;
}
Counts stop_counting() {
  is_counting = false;
  return std::move(all_counts);
}

std::unique_ptr<Memory> begin_counted_block(const Launch& launch) {
  return is_counting ? std::make_unique<CountedBlock>(launch) : nullptr;
}

}  // namespace ringcomm::ptx
