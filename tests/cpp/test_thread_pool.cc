// Collectives whose copies and sums are split over threads, and the cores that a rank has for them.
// Threads that cannot be started: the call fails with a message, keeps no memory of its caller, and
// ends the group.
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "children.h"
#include "collective_case.h"
#include "core/errors.h"
#include "host/host_arch.h"
#include "host/process.h"
#include "host/thread_pool.h"
#include "memory_messages.h"
#include "send_recv_messages.h"
#include "third_party/doctest/doctest.h"
#include "thread_limit.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;

std::atomic<int> num_runs = 0;

// Threads made for each run.
constexpr host::ThreadTeam kTeam = {
    [] { return 3; },
    [](std::size_t num_parts, const std::function<void(std::size_t)>& run) {
      ++num_runs;
      std::vector<std::thread> threads;
      for (std::size_t part = 1; part < num_parts; ++part)
        threads.emplace_back([&run, part] { run(part); });
      run(0);
      for (std::thread& thread : threads) thread.join();
    }};

// While it exists, the test's process has that team.
class TeamOfThree {
 public:
  TeamOfThree() { host::set_thread_team(kTeam); }
  ~TeamOfThree() { host::set_thread_team(before_); }
  TeamOfThree(const TeamOfThree&) = delete;
  TeamOfThree& operator=(const TeamOfThree&) = delete;

 private:
  host::ThreadTeam before_ = host::thread_team();
};

TEST_CASE("thread pool: every collective on three threads of each rank") {
  const TeamOfThree team;
  num_runs = 0;
  for (const char* placement : {"aa", "aaa"})
    run_placed(placement,
               [](Communicator& communicator) {
                 run_cases(communicator,
                           {.counts = {65'537, 800'003}, .in_place = {}, .uneven = {false, true}});
                 const int num_before = num_runs;
                 run_case(communicator, {.algorithm = Algorithm::kRing, .num_elems = 800'003});
                 CHECK(num_runs > num_before);
               },
               {.max_threads = 3});
  CHECK(num_runs > 0);
}

TEST_CASE("thread pool: parts cover all elements once, in whole lines") {
  const TeamOfThree team;
  host::ThreadPool pool(3);
  pool.begin(std::size_t{1} << 20);
  for (const std::size_t num :
       {std::size_t{0}, std::size_t{1}, std::size_t{262'144}, std::size_t{262'145},
        std::size_t{300'007}, std::size_t{1'000'000}}) {
    std::vector<std::atomic<int>> seen(num);
    std::atomic<int> num_unaligned = 0;
    pool.split(num, 4, [&](std::size_t begin, std::size_t end) {
      if (begin % 64 != 0) ++num_unaligned;
      for (std::size_t i = begin; i < end; ++i) ++seen[i];
    });
    CHECK(num_unaligned == 0);
    CHECK(std::ranges::all_of(seen, [](const auto& count) { return count == 1; }));
  }
}

TEST_CASE("thread pool: a rank has several threads where each has a core, in large calls only") {
  const TeamOfThree team;
  constexpr std::size_t kLarge = std::size_t{1} << 20, kSmall = 255 << 10;
  const auto may_split = [&](int num_cores, int max_threads, std::size_t num_bytes) {
    const host::CoreShare share(num_cores);
    host::ThreadPool pool(max_threads);
    pool.begin(num_bytes);
    return pool.may_split();
  };
  CHECK(!may_split(2, 0, kLarge));
  CHECK(may_split(3, 0, kLarge));
  CHECK(may_split(2, 2, kLarge));
  CHECK(!may_split(2, 3, kSmall));
  CHECK(!may_split(8, 1, kLarge));
  const host::CoreShare of_other_group(0.5);
  CHECK(host::CoreShare::most_ranks_per_core() == 2);
  CHECK(!may_split(8, 0, kLarge));
  bool of_library = true;
  std::thread([&] {
    host::leave_thread_team();
    of_library = may_split(8, 3, kLarge);
  }).join();
  CHECK(!of_library);
}

// libgomp waits in a forked process for the threads of its parent,
// https://github.com/OpenMathLib/OpenBLAS/issues/294.
TEST_CASE("thread pool: a forked process works alone") {
  const TeamOfThree team;
  const auto has_team = [] {
    const host::CoreShare share(3);
    host::ThreadPool pool(0);
    pool.begin(std::size_t{1} << 20);
    return pool.may_split() ? 1 : 0;
  };
  CHECK(has_team() == 1);
  CHECK(status_of_child(has_team) == 0);
}

// A torch with more threads than cores was ended by libgomp,
// https://github.com/pytorch/pytorch/issues/193859.
TEST_CASE("thread pool: a team is begun for the cores of a rank only where threads are pinned") {
  const TeamOfThree team;
  const host::Cores all = host::cores_of_thread();
  if (all.count() < 2) {
    MESSAGE("skipped: one core");
    return;
  }
  std::size_t last = all.size() - 1;
  while (!all.test(last)) --last;
  const auto runs_of = [&](const host::Cores& cores) {
    num_runs = 0;
    std::thread([&] {
      CHECK((host::restrict_thread(cores) && !host::usable_cores().empty()));
    }).join();
    return num_runs.load();
  };
  CHECK(runs_of(all) == 0);
  CHECK(runs_of(host::Cores{}.set(last)) == 1);  // this thread has others
}

// Also if the process was stopped in one of the first calls, which then took long: as of a stalled
// sample, https://github.com/ahrefs/ocannl/issues/855.
TEST_CASE("thread pool: a team that is slower than the caller alone pauses, longer each time") {
  const TeamOfThree team;
  const host::CoreShare share(3);
  for (int stopped = -1; stopped < 3; ++stopped) {
    CAPTURE(stopped);
    host::ThreadPool pool(0);
    int num_alone = 0;
    std::vector<int> pauses;
    for (int call = 0; call < 1000; ++call) {
      pool.begin(std::size_t{1} << 20);
      const bool is_team = pool.num_threads() > 1;
      num_alone += is_team ? 0 : 1;
      if (is_team) pauses.push_back(std::exchange(num_alone, 0));
      pool.split(1 << 20, 1, [&](std::size_t, std::size_t) {
        const int ms = is_team ? 5 : call == stopped ? 50 : 0;
        if (ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(ms));
      });
      pool.end();
    }
    CHECK(pauses == std::vector<int>{3, 6, 12, 24, 48, 96, 192, 384});
  }
}

TEST_CASE("thread pool: each core, and the quota, is shared equally by the ranks that may use it") {
  using host::cores_per_rank;
  CHECK(cores_per_rank({"0-7", "8-15"}) == 8);   // pinned
  CHECK(cores_per_rank({"0-15", "0-15"}) == 8);  // shared
  CHECK(cores_per_rank({"0, 2, 4", "1, 3, 5"}) == 3);
  CHECK(cores_per_rank({"0-3", "4-15"}) == 4);      // as many as every rank has
  CHECK(cores_per_rank({"0-15", "0-15"}, 4) == 2);  // a quota of four cores
  CHECK(cores_per_rank({"0", "0"}) == 0.5);
  CHECK(cores_per_rank({"0-1", "1"}) == 0.5);
  // At least 1 / N, where what is not known may be one core, and a faulty peer have written it.
  CHECK(cores_per_rank({"0-7", "0-7"}, 0.1) == 0.5);
  for (const char* wrong : {"", "x", "-", "7-3", "9000-9999", "99999999999999999999"})
    CHECK(cores_per_rank({"0-9", "10-19", wrong, "20-29"}) == 0.25);
  const auto sharing = [](const std::vector<std::string>& cores, double quota = 1e9) {
    const host::CoreShare share(cores_per_rank(cores, quota));
    return std::pair(host::CoreShare::most_ranks_per_core(),
                     host::CoreShare::fewest_cores_per_rank());
  };
  CHECK(sharing({"0", "1"}) == std::pair(1, 1));
  CHECK(sharing({"0-15", "0-15", "0-15"}) == std::pair(1, 5));
  CHECK(sharing({"1023", "1024", "8191"}) == std::pair(1, 1));
  CHECK(sharing({"0-1", "0-1", "0-1"}) == std::pair(2, 0));
  CHECK(sharing(std::vector<std::string>(64, "0-1")) == std::pair(32, 0));
  CHECK(sharing({"0", "0", "0", "1-9"}) == std::pair(3, 0));
  CHECK(sharing({"0-2", "0-2", "0-2"}) == std::pair(1, 1));  // three thirds
  CHECK(sharing({"0", "1-18446744073709551615"}) == std::pair(1, 1));
  CHECK(sharing({"0-7", "0-7", "0-7"}, 1.5) == std::pair(2, 0));
  CHECK(host::CoreShare::most_ranks_per_core() == 1);
}

// The kernel of a machine with more than 1,024 cores refuses a cpu_set_t,
// https://github.com/tensorflow/tensorflow/issues/49833.
TEST_CASE("thread pool: cores are known on a machine with more than cpu_set_t has room for") {
  const std::string expected = host::usable_cores();
  CHECK(!expected.empty());
  const int status = status_of_child([&] {
    if (!refuse_calls(SYS_sched_getaffinity, 1, 0, sizeof(cpu_set_t))) return 77;  // not here
    cpu_set_t small;
    if (::sched_getaffinity(0, sizeof(small), &small) == 0) return 100;
    return host::usable_cores() == expected ? 0 : 101;
  });
  CHECK((status == 0 || status == 77));
}

// The numbers of nodes may have gaps, https://github.com/open-mpi/hwloc/issues/430.
TEST_CASE("thread pool: a thread that moves stays on its NUMA node") {
  namespace fs = std::filesystem;
  const fs::path nodes = fs::temp_directory_path() / ("ringcomm-nodes-" + host::random_text());
  for (const auto& [name, cores] : {std::pair{"node0", "0-3,8-11\n"},
                                    {"node1", "\n"},
                                    {"node10", "4-7,12-15\n"},
                                    {"power", "on\n"}}) {
    fs::create_directories(nodes / name);
    std::ofstream(nodes / name / "cpulist") << cores;
  }
  const auto set_of = [](std::vector<std::size_t> cores) {
    host::Cores set;
    for (const std::size_t core : cores) set.set(core);
    return set;
  };
  const auto found = [&](const std::vector<std::size_t>& cores, std::size_t near,
                         const char* folder = "") {
    return host::cores_of_node(set_of(cores), near, host::read_nodes((nodes / folder).string()));
  };
  CHECK(found({0, 1, 4, 5, 8}, 1) == set_of({0, 1, 8}));
  CHECK(found({0, 1, 4, 5, 8}, 4) == set_of({4, 5}));
  CHECK(found({0, 1, 4}, 4) == set_of({0, 1, 4}));     // alone there
  CHECK(found({0, 1, 20}, 20) == set_of({0, 1, 20}));  // of no node
  CHECK(found({0, 1}, 0, "none") == set_of({0, 1}));
  fs::remove_all(nodes);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // they have a malloc, too
thread_local int num_allocations = 0;

TEST_CASE(
    "thread pool: a thread that leaves its waker's core reads no text and allocates nothing") {
  NoStop source;
  const host::HostArch arch(source, 0);
  std::uint32_t core = 0;
  int most = 0;
  for (int wake = 0; wake < 100; ++wake) {
    arch.record_core(core);
    const int before = num_allocations;
    arch.leave_core(core);
    if (wake > 0) most = std::max(most, num_allocations - before);  // the first reads the nodes
  }
  CHECK(most == 0);
}
#endif

constexpr const char* kReason = "could not be started";

void expect_no_thread(const std::function<void()>& body) {
  testing::expect_throws<std::system_error>(body, {kReason});
}

// The other ranks learn why, although the process of this one lives on.
void expect_told(const std::function<void()>& body) {
  testing::expect_throws<Error>(body, {"rank 0", kReason});
}

// The threads of a first operation: one that waits, and the watchdog.
TEST_CASE("no threads: sends and receives") {
  for (int num_threads = 0; num_threads <= 2; ++num_threads) {
    CAPTURE(num_threads);
    run_placed("abc", [num_threads](Communicator& communicator) {
      constexpr std::size_t kLong = 20'000;
      const bool is_enough = num_threads == 2;
      if (communicator.rank() != 0) {
        const auto work = [&] {
          testing::recv_and_check(communicator, 0, 5, 0, kLong);
          testing::send_and_finish(communicator, 0, 7, 0, kLong);
        };
        return is_enough ? work() : expect_told(work);
      }
      // Buffers of calls that fail are freed at once: AddressSanitizer sees any use of them.
      const auto receive = [&] { return testing::post_recv(communicator, -1, 7, kLong); };
      std::vector<testing::Message> posted;
      {
        const ThreadLimit limit(num_threads);
        if (!is_enough) return expect_no_thread([&] { receive(); });
        posted.push_back(receive());
      }
      posted.push_back(receive());
      for (const int peer : {1, 2})
        posted.push_back(
            testing::post_send(communicator, peer, 5, testing::message(0, 5, 0, kLong)));
      for (const auto& message : posted) testing::finish(communicator, message);
      for (const auto& message : posted)
        if (message.op->kind == OpKind::kRecv)
          testing::expect_message(message, message.op->peer, 7, 0);
    });
  }
}

TEST_CASE("no threads: collectives") {
  run_placed("ab", [](Communicator& communicator) {
    const auto call = [&] { testing::barrier(communicator); };
    if (communicator.rank() == 1) return expect_told(call);
    const ThreadLimit limit(0);
    expect_no_thread(call);
  });
}

}  // namespace

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
// In libc's place: counts.
extern "C" void* __libc_malloc(std::size_t num_bytes);
extern "C" void* malloc(std::size_t num_bytes) {
  ++num_allocations;
  return __libc_malloc(num_bytes);
}
#endif
