// The agreement of survivors, with a rank that is killed or stopped at every step of it: the ranks
// that live return the same set, which has all of them, and a group of it that works.
//
// Rank 0 ends before, and with it the group fails. Ranks are processes, forked from a process
// without threads: this program again, started with the one test case "child: ...".
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "children.h"
#include "communicator/communicator.h"
#include "core/annotations.h"
#include "folder_store.h"
#include "host/fd.h"
#include "host/group.h"
#include "host/process.h"
#include "host/survivors.h"
#include "host/wait.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using std::chrono::milliseconds;
using testing::FolderStore;

constexpr int kRanks = 4;
constexpr const char* kPlanVariable = "RINGCOMM_TEST_SURVIVORS";
constexpr milliseconds kPatience{20'000};
constexpr milliseconds kStopTimeout{1'500};
constexpr int kMorePatience = 8;
constexpr milliseconds kLateness{100};
constexpr int kMaxFailures = 3;

struct Report {
  std::atomic<bool> is_there = false;
  std::uint64_t set = 0;
  int attempt = -1;
  std::array<char, 300> error = {};
};

struct Board {
  std::atomic<int> num_steps = 0;
  std::atomic<bool> is_counting = false, has_ended = false;
  std::array<char, 80> last_step = {};
  std::array<Report, kRanks> reports;
};

struct Plan {
  int victim = 1;
  int step = 0;  // counted from 1; 0: none
  int signal = SIGKILL;
  int is_slow = 0;  // whether one rank is late, and the others do all they can before the end
};

Board* board = nullptr;
Plan plan;
// What a rank waits for a stopped one.
milliseconds stop_timeout = kStopTimeout;

void count_step(const char* what) {
  if (!board->is_counting.load() || board->num_steps.fetch_add(1) + 1 != plan.step) return;
  std::snprintf(board->last_step.data(), board->last_step.size(), "%s", what);
  if (plan.is_slow != 0) std::this_thread::sleep_for(kLateness / 4);
  board->has_ended = true;
  ::raise(plan.signal);
}

// Looks for the others only after the victim's end: this rank then misses what another one has had
// of the victim.
void be_late(const char* what) {
  static auto patience = kLateness;
  if (!board->is_counting || std::strcmp(what, "after a record was read") != 0) return;
  for (; !board->has_ended && patience.count() > 0; --patience)
    std::this_thread::sleep_for(milliseconds(1));
}

std::unique_ptr<Communicator> make_group(const std::string& folder, const std::string& prefix,
                                         int rank, int world_size, milliseconds timeout,
                                         const PeerProcesses& known = {}) {
  FolderStore store(folder, [] {}, prefix);
  return std::make_unique<Communicator>(store, rank, world_size, CommunicatorOptions{}, timeout,
                                        MakeMessenger{}, KnownRanks{known, {}});
}

host::Group& group_of(Communicator& communicator) {
  return dynamic_cast<host::Group&>(*communicator.group_state());
}

void survive(int rank, const std::string& folder) {
  const auto old = make_group(folder, "old/", rank, kRanks, kPatience);
  const WaitLimits patient{.timeout = kPatience, .is_interrupted = {}};
  old->run({{.op = OpKind::kBarrier}}, patient);
  if (rank == 0) ::raise(SIGKILL);
  // gone_before() looks at nobody before the count, which is increased last.
  for (Backoff backoff; !old->group_state()->has_died(0) || PeerProcess::num_ended == 0;)
    backoff.sleep();
  // It has begun the first call, and will not begin the second.
  if (group_of(*old).gone_before(0) != -1 || group_of(*old).gone_before(1) != 0)
    throw std::runtime_error("a call of a dead rank is not told from one that it never begins");
  if (rank == plan.victim) board->is_counting = true;
  const milliseconds timeout = plan.signal == SIGSTOP ? stop_timeout : kPatience;
  host::Group& group = group_of(*old);
  host::Survivors survivors(group, {.timeout = timeout, .is_interrupted = {}});
  std::unique_ptr<Communicator> made;
  std::vector<int> ranks;
  do {
    made.reset();
    ranks = survivors.agree();
    try {
      const host::UniqueFd store(survivors.take_store());
      PeerProcesses known;
      for (const int other : ranks)
        known.push_back(group.processes()[static_cast<std::size_t>(other)]);
      const auto own = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
      made = make_group(folder, "new" + std::to_string(survivors.attempt()) + "/",
                        static_cast<int>(own), static_cast<int>(ranks.size()), timeout, known);
    } catch (const Error& error) {  // the next attempt
      // A death ends every wait at once, also that for a rank that has given up and lives.
      if (plan.signal == SIGKILL && error.info().kind == ErrorKind::kTimeout) throw;
    }
  } while (!survivors.confirm(made != nullptr));
  board->is_counting = board->is_counting && rank != plan.victim;
  Report& mine = board->reports[static_cast<std::size_t>(rank)];
  for (const int other : ranks) mine.set |= std::uint64_t{1} << other;
  mine.attempt = survivors.attempt();
  try {
    made->run({{.op = OpKind::kBarrier}}, {.timeout = timeout, .is_interrupted = {}});
  } catch (const Error& error) {
    // It may have lost a rank since.
    if (!board->has_ended) std::snprintf(mine.error.data(), mine.error.size(), "%s", error.what());
  }
  mine.is_there = true;
  for (;;) ::pause();  // its end is no death that the others should see
}

[[noreturn]] void rank_main(int rank, const std::string& folder) {
  if (rank == plan.victim) test_step = count_step;
  if (plan.is_slow != 0 && rank == (plan.victim == 3 ? 2 : 3)) test_step = be_late;
  Report& mine = board->reports[static_cast<std::size_t>(rank)];
  try {
    survive(rank, folder);
  } catch (const std::exception& error) {
    std::snprintf(mine.error.data(), mine.error.size(), "%s", error.what());
  }
  mine.is_there = true;
  for (;;) ::pause();
}

bool are_all_there() {
  const auto deadline = std::chrono::steady_clock::now() + 3 * kPatience;
  const auto is_there = [](int rank) {
    return (rank == plan.victim && board->has_ended) ||
           board->reports[static_cast<std::size_t>(rank)].is_there;
  };
  for (Backoff backoff; std::chrono::steady_clock::now() < deadline; backoff.sleep())
    if (is_there(1) && is_there(2) && is_there(3)) return true;
  return false;
}

std::string judge() {
  std::string problems;
  const Report* first = nullptr;
  for (int rank = 1; rank < kRanks; ++rank) {
    if (rank == plan.victim && board->has_ended) continue;
    const Report& theirs = board->reports[static_cast<std::size_t>(rank)];
    if (first == nullptr) first = &theirs;
    std::string problem;
    if (!theirs.is_there)
      problem = "hangs";
    else if (theirs.error[0] != '\0')
      problem = theirs.error.data();
    else if ((theirs.set >> rank & 1) == 0)
      problem = "is not in its set";
    else if (theirs.set != first->set || theirs.attempt != first->attempt)
      problem = "has set " + std::to_string(theirs.set) + " of attempt " +
                std::to_string(theirs.attempt) + ", and another rank " +
                std::to_string(first->set) + " of attempt " + std::to_string(first->attempt);
    if (!problem.empty()) problems += "\n    rank " + std::to_string(rank) + ": " + problem;
  }
  return problems;
}

std::string run_plan(const std::string& folder) {
  new (board) Board;
  std::filesystem::remove_all(folder);
  std::filesystem::create_directory(folder);
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(::fork());
    if (ranks.back() == 0) rank_main(rank, folder);
    REQUIRE(ranks.back() > 0);  // kill(-1) would be for every process there is
  }
  are_all_there();
  for (const pid_t pid : ranks) ::kill(pid, SIGKILL);
  for (const pid_t pid : ranks) ::waitpid(pid, nullptr, 0);
  const std::string problems = judge();
  if (problems.empty()) return {};
  return "  rank " + std::to_string(plan.victim) + " ends at step " + std::to_string(plan.step) +
         ", " + board->last_step.data() + ":" + problems;
}

TEST_CASE("child: a survivor ends at every step" * doctest::skip()) {
  const char* text = std::getenv(kPlanVariable);
  int stride = 0;
  if (text == nullptr) return;
  REQUIRE(std::sscanf(text, "%d %d %d", &plan.signal, &stride, &plan.is_slow) == 3);
  void* memory =
      ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  board = static_cast<Board*>(memory);
  const std::string folder =
      std::filesystem::temp_directory_path() / ("ringcomm-survivors-" + std::to_string(::getpid()));
  int num_failed = 0, num_runs = 0;
  for (plan.victim = 1; plan.victim < kRanks; ++plan.victim) {
    // A run without an end counts the steps.
    for (int step = 0, num_steps = 1; step <= num_steps && num_failed < kMaxFailures;
         step += step == 0 ? 1 + plan.victim % stride : stride, ++num_runs) {
      plan.step = step;
      std::string failure = run_plan(folder);
      if (!failure.empty() && plan.signal == SIGSTOP) {
        // On a busy machine a rank that lives may be late, too: then it is right to leave it out.
        stop_timeout = kMorePatience * kStopTimeout;
        failure = run_plan(folder);
        stop_timeout = kStopTimeout;
      }
      if (!failure.empty()) ++num_failed;
      if (!failure.empty()) std::fprintf(stderr, "%s\n", failure.c_str());
      if (step == 0) num_steps = board->num_steps;
    }
  }
  std::fprintf(stderr, "  %d runs of survivors, one with signal %d\n", num_runs, plan.signal);
  std::filesystem::remove_all(folder);
  ::_exit(num_failed == 0 ? 0 : 1);
}

// Every `stride`-th step.
bool run_child(int signal, int stride, bool is_slow = false) {
  const std::string text =
      std::to_string(signal) + " " + std::to_string(stride) + " " + std::to_string(int{is_slow});
  return testing::status_of_case("--test-case=child: a survivor*", kPlanVariable, text) == 0;
}

// Of two ranks, that are threads.
struct AgreementWords {
  struct Memory {
    std::array<Cursor, 2> stages;
    std::array<std::uint64_t, 2> proposals;
    std::uint64_t chosen, verdict;
  };
  Memory* memory;

  Cursor& stage(int rank) const { return memory->stages[static_cast<std::size_t>(rank)]; }
  std::uint64_t& proposal(int, int rank, int) const {
    return memory->proposals[static_cast<std::size_t>(rank)];
  }
  std::uint64_t& chosen(int) const { return memory->chosen; }
  std::uint64_t& verdict(int) const { return memory->verdict; }
};

TEST_CASE("survivors: nobody hears that all have made the group before they have") {
  struct UntilVerdict final : WaitGuard {
    explicit UntilVerdict(std::uint64_t& verdict) : verdict(verdict) {}
    WaitStatus check(int) override {
      return __atomic_load_n(&verdict, __ATOMIC_ACQUIRE) == 0 ? WaitStatus::kNone
                                                              : WaitStatus::kInterrupted;
    }
    std::uint64_t& verdict;
  };
  for (const bool has_made : {false, true}) {
    AgreementWords::Memory memory{};
    const AgreementWords words{&memory};
    UntilVerdict source(memory.verdict), other_source(memory.verdict);
    host::HostArch arch(source, 0), other_arch(other_source, 1);
    SurvivorProtocol first(arch, words, 0, 2), other(other_arch, words, 1, 2);
    RankSet both;
    both.add(0);
    both.add(1);
    std::atomic<bool> all_made = false;
    std::thread waits([&] { all_made = first.confirm(0, both, true); });
    CHECK(other.wait_for(0, decltype(other)::kMade, 0) == WaitStatus::kNone);
    std::this_thread::sleep_for(milliseconds(20));  // in which it might answer too early
    CHECK(other.confirm(0, both, has_made) == has_made);
    waits.join();
    CHECK(all_made == has_made);
  }
}

TEST_CASE("survivors: a rank that is killed at any step of the agreement") {
  CHECK(run_child(SIGKILL, testing::asks_for("all") ? 1 : 5));
}

TEST_CASE("survivors: a rank that is killed at any step while another is late") {
  CHECK(run_child(SIGKILL, testing::asks_for("all") ? 1 : 2, true));
}

TEST_CASE("survivors: a rank that stops at any step of the agreement") {
  CHECK(run_child(SIGSTOP, testing::asks_for("all") ? 1 : 29));
}

}  // namespace
