#pragma once

#include <algorithm>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "core/chunk_layout.h"
#include "host/ticks.h"

namespace ringcomm::host {

/// Cores by their numbers. As many as Linux may have: the kernel refuses to fill a smaller set than
/// its own, and glibc's cpu_set_t ends at 1,024.
using Cores = std::bitset<8192>;

/// Calls `visit` with each core, ascending. By libstdc++'s own search: most of a set is empty.
template <class Visit>
void for_each_core(const Cores& cores, const Visit& visit) {
  for (std::size_t core = cores._Find_first(); core < cores.size(); core = cores._Find_next(core))
    visit(core);
}

/// Those that a thread may use, by default the calling one; none where the kernel does not tell.
Cores cores_of_thread(int thread = 0);
/// Restricts the calling thread to these; false where the kernel refuses.
bool restrict_thread(const Cores& cores);

/// The cores on which this rank's kernels may run, as text for its record ("0-3, 8"): those of this
/// thread, or of all threads of its team where the program has pinned each to cores of its own.
/// Empty where that is not known.
std::string usable_cores();

/// The cores of each NUMA node; empty where the kernel does not tell.
std::vector<Cores> read_nodes(const std::string& folder = "/sys/devices/system/node");
/// Of some cores those of the node that has core `near`, or all where that leaves fewer than two.
Cores cores_of_node(const Cores& cores, std::size_t near, const std::vector<Cores>& nodes);

/// How many cores each of the ranks of a host has, given by their usable_cores(), where each core
/// and `quota`, the CPU time per time of their cgroup, are shared equally by those that may use it:
/// the smallest share of any rank. 1 / N for N ranks at least, and where one's cores are not known.
double cores_per_rank(const std::vector<std::string>& cores_of_ranks,
                      double quota = std::numeric_limits<double>::infinity());

/// cores_per_rank() of a group, for as long as this process has the group. Groups of one process
/// run on the same cores, so the smallest share counts for all.
class CoreShare {
 public:
  explicit CoreShare(double cores_per_rank);
  ~CoreShare();
  CoreShare(const CoreShare&) = delete;
  CoreShare& operator=(const CoreShare&) = delete;

  /// How many ranks share a core; 1 if each has one to itself, and without a group.
  static int most_ranks_per_core();
  /// How many cores each rank has to itself; 0 without a group.
  static int fewest_cores_per_rank();

 private:
  void count(bool exists) const;

  double cores_per_rank_;
};

/// The threads on which the program's own kernels run. Copies and sums use them too: threads of
/// their own would share the cores with these, which spin for a while after each kernel.
struct ThreadTeam {
  /// How many threads run a kernel that the calling thread begins, with that thread.
  int (*size)();
  /// Calls `run` with every number below `num_parts`, each on one thread, and returns after all.
  void (*run)(std::size_t num_parts, const std::function<void(std::size_t)>& run);
};
/// Before the first group. Without a team every rank has one thread. `is_inherited`: this process
/// was forked after the team had been loaded.
void set_thread_team(const ThreadTeam& team, bool is_inherited = false);
const ThreadTeam& thread_team();
/// False in a forked process: libgomp waits there for the threads that its parent had, in the
/// thread that has begun a kernel before.
bool may_use_team();
/// From now on this thread works alone. For threads of the library: a team that they began would
/// be a second one.
void leave_thread_team();

/// The threads of one rank that copy and sum in its collectives. They take no part in the protocol:
/// the thread that called waits and publishes, and the others have returned when it does.
///
/// Threads that sleep, or whose cores run other programs, come late: a team that was slower than
/// the caller alone pauses (docs/design/collectives.md, "Threads of a rank").
class ThreadPool {
 public:
  /// `max_threads` of the team are used, always; 0 means all, while each has a core (CoreShare) and
  /// that is faster.
  explicit ThreadPool(int max_threads);

  /// Chooses the number of threads for a call in which this rank moves `num_bytes`.
  void begin(std::size_t num_bytes);
  /// After the call, unless it failed.
  void end();
  /// Whether the call may have several threads, so that its copies go through split().
  bool may_split() const { return may_split_; }
  std::size_t num_threads() const { return num_threads_; }

  /// Calls `run(begin, end)` for ranges that cover `num` elements of `element_bytes` once, at the
  /// same time where they are large enough.
  template <class Run>
  void split(std::size_t num, std::size_t element_bytes, const Run& run) {
    const std::size_t num_parts = std::min(num_threads_, num * element_bytes / kMinPartBytes);
    if (!may_split_) return run(std::size_t{0}, num);
    const std::uint64_t begin_ticks = ticks();
    if (num_parts <= 1)
      run(std::size_t{0}, num);
    else
      run_parts(num_parts, num, run);
    taken_ticks_ += ticks() - begin_ticks;
    moved_bytes_ += num * element_bytes;
  }
  /// split() of elements that come from `sources`: calls `run` with these moved to each range.
  template <class Run>
  void split_sources(std::span<const void* const> sources, std::size_t num,
                     std::size_t element_bytes, const Run& run) {
    split(num, element_bytes, [&](std::size_t begin, std::size_t end) {
      if (begin == 0) return run(sources.data(), ElemRange{0, end});
      std::vector<const void*> moved(sources.begin(), sources.end());
      for (const void*& source : moved)
        source = static_cast<const std::byte*>(source) + begin * element_bytes;
      run(moved.data(), ElemRange{begin, end - begin});
    });
  }

 private:
  // A copy of it takes several times as long as the threads need to begin and to end.
  static constexpr std::size_t kMinPartBytes = std::size_t{64} << 10;
  // Elements: parts begin at whole cache lines of an aligned buffer.
  static constexpr std::size_t kMultiple = 64;
  // Calls of the caller alone: at first, and after a call in which the team was slower; twice as
  // many each time.
  static constexpr int kFirstAlone = 3, kMostAlone = 1024;

  template <class Run>
  static void run_parts(std::size_t num_parts, std::size_t num, const Run& run) {
    const std::size_t part = (num / num_parts + kMultiple) / kMultiple * kMultiple;
    const auto run_part = [&](std::size_t idx) {
      const std::size_t begin = std::min(idx * part, num);
      if (const std::size_t end = std::min(begin + part, num); begin < end) run(begin, end);
    };
    thread_team().run(num_parts, std::ref(run_part));  // by reference: a copy would allocate
  }

  int num_allowed_;  // cores of the thread that made the group
  int max_threads_;
  // Of the call.
  bool may_split_ = false;
  std::size_t num_threads_ = 1;
  std::uint64_t taken_ticks_ = 0;
  std::size_t moved_bytes_ = 0;
  // Of the calls before.
  double alone_ticks_per_byte_ = 0;
  int num_alone_left_ = kFirstAlone;
  int num_alone_next_ = 2 * kFirstAlone;
};

}  // namespace ringcomm::host
