// A rank that is killed, stopped, or replaced by exec() at every step of what groups do: every
// other rank must get an error that names it, within two seconds of a death, by time-out of a stop.
// A rank that is late at every step, while the others do their part and end: no rank gets an error.
//
// Steps are counted by the library itself (RINGCOMM_STEP): cursors that advance, memory that is
// mapped, sent or received, and what a rank writes for its peers; and by the store and the messages
// of these tests. So new code is covered without a list. Ranks are processes, forked from a process
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
#include <exception>
#include <filesystem>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "children.h"
#include "collective_case.h"
#include "core/annotations.h"
#include "folder_store.h"
#include "host/process.h"
#include "host/shared_arena.h"
#include "host/wait.h"
#include "send_recv_messages.h"
#include "socket_messages.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using std::chrono::milliseconds;
using testing::FolderStore;
using testing::run_case;

constexpr int kMaxRanks = 4;
constexpr const char* kPlanVariable = "RINGCOMM_TEST_DEATHS";

// A machine that is busy may let a rank notice late, or be late itself, once: such a run is
// repeated, with longer time-outs.
constexpr int kMaxTries = 3;
// More would tell little more.
constexpr int kMaxFailures = 5;
constexpr bool kIsSanitized = testing::kHasThreadSanitizer || testing::kHasAddressSanitizer;
constexpr milliseconds kSoon{kIsSanitized ? 10'000 : 2'000};
constexpr milliseconds kPatience{20'000};
constexpr milliseconds kStopTimeout{600};
// Enough for the others to end, if they do not wait for the late rank.
constexpr milliseconds kLateness{150};

enum class End { kKilled, kStopped, kReplaced, kLateForGroup, kLateForCalls };
constexpr const char* kEndNames[] = {"killed", "stopped", "replaced",
                                     "late while the others make a group and end",
                                     "late while the others make calls and end"};

// The transport of the ranks' data.
enum class Over { kMemory, kMessages, kHosts };
constexpr const char* kOverNames[] = {"memory", "messages", "hosts"};
// The host of each rank: one with two ranks at least, and the ranks of one not side by side.
constexpr const char* kPlacements[] = {"", "", "", "aba", "abba"};

std::int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// The result of a rank.
struct Report {
  std::atomic<bool> is_there = false;
  bool is_error = false;
  ErrorKind kind = ErrorKind::kSystem;
  int culprit = -1;
  std::int64_t at_ns = 0;
  std::array<char, 400> text = {};
};

// Memory that the ranks of a run share with the process that looks on.
struct Board {
  std::atomic<bool> have_all_begun = false;
  std::atomic<int> num_steps = 0;
  std::atomic<bool> is_counting = false;
  std::atomic<std::int64_t> end_ns = 0;
  std::array<char, 80> last_step = {};
  std::array<Report, kMaxRanks> reports;
};

// ---- what ranks do

struct Plan {
  int world_size = 2;
  int victim = 0;
  int step = 0;  ///< counted from 1; 0: none
  End end = End::kKilled;
  Over over = Over::kMemory;
  bool aborts = false;
  milliseconds stop_timeout = kStopTimeout;

  bool is_late() const { return end == End::kLateForGroup || end == End::kLateForCalls; }
  std::string to_text() const {
    return "over " + std::string(kOverNames[static_cast<int>(over)]) + ", rank " +
           std::to_string(victim) + " of " + std::to_string(world_size) + " " +
           kEndNames[static_cast<int>(end)] + " at step " + std::to_string(step);
  }
};

Board* board = nullptr;
Plan plan;

void run_collectives(Communicator& communicator, const WaitLimits& limits) {
  communicator.run({{.op = OpKind::kBarrier}}, limits);
  for (const Algorithm algorithm : testing::kAlgorithms)
    run_case(communicator, {.algorithm = algorithm, .num_elems = 300}, limits);
  for (const OpKind op : {OpKind::kReduce, OpKind::kReduceScatter, OpKind::kAllGather,
                          OpKind::kBroadcast, OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll})
    run_case(communicator, {.op = op, .root = testing::rooted(op) ? 1 : -1, .num_elems = 100},
             limits);
  run_case(communicator, {.op = OpKind::kAllToAll, .num_elems = 50, .is_uneven = true}, limits);
}

void send_around(Communicator& communicator, const WaitLimits& limits) {
  const int rank = communicator.rank(), world_size = communicator.world_size();
  // More than a link holds, in two pieces.
  const auto sent = testing::post_send(communicator, (rank + 1) % world_size, 0,
                                       testing::Bytes(300'000), limits.timeout);
  const auto received = testing::post_recv(communicator, (rank + world_size - 1) % world_size, 0,
                                           300'000, limits.timeout);
  for (const auto* waited : {&received, &sent}) testing::finish(communicator, *waited);
}

// What `to` gets from all other ranks, which need nothing of it: messages, one of them small enough
// for an envelope, and calls.
void send_and_call(Communicator& communicator, int to, const WaitLimits& limits) {
  run_case(communicator, {.num_elems = 300}, limits);
  for (const std::size_t num_bytes : {std::size_t{4}, std::size_t{300'000}}) {
    if (communicator.rank() != to)
      testing::finish(communicator, testing::post_send(communicator, to, 0,
                                                       testing::Bytes(num_bytes), limits.timeout));
    for (int peer = 0; peer < communicator.world_size() && communicator.rank() == to; ++peer)
      if (peer != to)
        testing::finish(communicator,
                        testing::post_recv(communicator, peer, 0, num_bytes, limits.timeout));
  }
  const int root = (to + 1) % communicator.world_size();
  run_case(communicator, {.op = OpKind::kBroadcast, .root = root, .num_elems = 100}, limits);
  run_case(communicator, {.op = OpKind::kGather, .root = to, .num_elems = 100}, limits);
}

void sum_shared(Communicator& communicator, const WaitLimits& limits) {
  constexpr std::size_t kElems = std::size_t{1} << 20;
  void* block = host::SharedArena::instance().allocate(kElems * sizeof(float));
  const void* input = block;
  communicator.run(
      {{.num_elems = kElems, .op = OpKind::kAllReduce, .dtype = DType::kFloat32}, &input, &block},
      limits);
  host::SharedArena::instance().deallocate(block);
}

// ---- the rank that ends

void count_step(const char* what) {
  if (!board->is_counting.load()) return;
  if (board->num_steps.fetch_add(1) + 1 != plan.step) return;
  std::snprintf(board->last_step.data(), board->last_step.size(), "%s", what);
  board->end_ns = now_ns();
  if (plan.end == End::kKilled) ::raise(SIGKILL);
  if (plan.end == End::kStopped) ::raise(SIGSTOP);
  if (plan.end == End::kReplaced) ::execl("/bin/sleep", "sleep", "100", nullptr);
  if (!plan.is_late()) return;
  board->end_ns = 0;
  std::this_thread::sleep_for(kLateness);
}

// As ringcomm.message_backend does: no rank has its messages before all have made theirs.
std::unique_ptr<Messenger> make_messenger(KeyValueStore& store, int rank, testing::SocketMesh& mesh,
                                          const std::string& key, const LookForRanks& look) {
  auto messages = std::make_unique<testing::SocketMessages>(rank, mesh.take(rank));
  store.set(key + "/made/" + std::to_string(rank), "");
  for (int peer = 0; peer < plan.world_size; ++peer) {
    for (Backoff backoff;; backoff.sleep()) {
      std::exception_ptr in_vain;
      try {
        look({peer});
      } catch (const Error&) {
        in_vain = std::current_exception();
      }
      if (store.try_get(key + "/made/" + std::to_string(peer))) break;
      if (in_vain != nullptr) std::rethrow_exception(in_vain);
    }
  }
  return messages;
}

std::unique_ptr<Communicator> make_group(KeyValueStore& store, int rank, testing::SocketMesh& mesh,
                                         milliseconds timeout, const PeerProcesses& known) {
  CommunicatorOptions options;
  if (plan.over == Over::kMessages) options.transport = "messages";
  if (plan.over == Over::kHosts) options.host_id = kPlacements[plan.world_size][rank];
  return std::make_unique<Communicator>(
      store, rank, plan.world_size, options, timeout,
      [&](const std::string& key, const LookForRanks& look) {
        return make_messenger(store, rank, mesh, key, look);
      },
      KnownRanks{known, {}});
}

using Meshes = std::array<testing::SocketMesh, 2>;

void use_second_group(int rank, const std::string& folder, testing::SocketMesh& mesh,
                      Communicator& first, const WaitLimits& limits) {
  FolderStore store(folder, [] {}, "second/");
  const auto group =
      make_group(store, rank, mesh, limits.timeout, first.group_state()->processes());
  run_collectives(*group, limits);
}

// `group` is kept until everything is reported, because a rank that leaves it is at fault, too.
void live(int rank, const std::string& folder, Meshes& meshes,
          std::unique_ptr<Communicator>& group) {
  const bool is_victim = rank == plan.victim;
  const auto count = [&](bool is_on) {
    if (is_victim) board->is_counting = is_on;
  };
  // Before its first record the others cannot know of a rank.
  FolderStore store(folder, [&, is_first = true]() mutable {
    if (std::exchange(is_first, false)) count(!plan.aborts);
  });
  const bool may_stop = plan.end == End::kStopped && plan.step != 0;
  const WaitLimits limits{.timeout = may_stop ? plan.stop_timeout : kPatience,
                          .is_interrupted = {}};
  group = make_group(store, rank, meshes[0], limits.timeout, {});
  if (plan.end == End::kLateForCalls) send_and_call(*group, plan.victim, limits);
  if (plan.is_late()) return;
  std::exception_ptr failure;
  if (plan.aborts) {
    count(true);
    if (is_victim) group->abort("by its user");
  } else {
    run_collectives(*group, limits);
    send_around(*group, limits);
    sum_shared(*group, limits);
    try {
      use_second_group(rank, folder, meshes[1], *group, limits);
    } catch (const Error&) {
      failure = std::current_exception();  // the others may have completed it, and need this rank
    }
  }
  count(false);
  // Other ranks may still have had data of the dead rank, but these calls need the rank.
  try {
    for (int i = 0; i < 2; ++i) group->run({{.op = OpKind::kBarrier}}, limits);
  } catch (const Error&) {
    if (failure == nullptr) throw;
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

void report(int rank, const Error* error, const char* text) {
  Report& mine = board->reports[static_cast<std::size_t>(rank)];
  mine.at_ns = now_ns();
  mine.is_error = error != nullptr || *text != '\0';
  if (error != nullptr) {
    mine.kind = error->info().kind;
    mine.culprit = error->info().rank;
  }
  std::snprintf(mine.text.data(), mine.text.size(), "%s", text);
  mine.is_there = true;
}

[[noreturn]] void rank_main(int rank, const std::string& folder, Meshes& meshes) {
  // A record that is older than the process that reads it may be of an earlier attempt.
  for (Backoff backoff; !board->have_all_begun.load(); backoff.sleep()) {
  }
  if (rank == plan.victim) test_step = count_step;
  std::unique_ptr<Communicator> group;
  try {
    live(rank, folder, meshes, group);
    report(rank, nullptr, "");
  } catch (const Error& error) {
    report(rank, &error, error.what());
  } catch (const std::exception& error) {
    report(rank, nullptr, error.what());
  }
  if (plan.is_late()) ::_exit(0);
  for (;;) ::pause();  // its end is no death that the others should see
}

// ---- the process that looks on

bool wait_for_reports() {
  const auto deadline = std::chrono::steady_clock::now() + 2 * kPatience;
  const auto is_over = [] {
    for (int rank = 0; rank < plan.world_size; ++rank) {
      const bool has_ended = rank == plan.victim && board->end_ns.load() != 0;
      if (!has_ended && !board->reports[static_cast<std::size_t>(rank)].is_there) return false;
    }
    return true;
  };
  for (Backoff backoff; !is_over(); backoff.sleep())
    if (std::chrono::steady_clock::now() > deadline) return false;
  return true;
}

std::string judge(bool& is_late) {
  const std::int64_t end_ns = board->end_ns.load();
  std::string problems;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    if (rank == plan.victim && end_ns != 0) continue;
    const Report& theirs = board->reports[static_cast<std::size_t>(rank)];
    std::string problem;
    if (!theirs.is_there) {
      problem = "hangs";
    } else if (end_ns == 0) {  // the step was not reached this time
      if (theirs.is_error && theirs.kind != ErrorKind::kAborted) problem = "has an error";
    } else if (!theirs.is_error) {
      problem = "has no error";
    } else if (theirs.kind == ErrorKind::kAborted) {
      continue;  // it was reported before the end
    } else if (theirs.kind !=
               (plan.end == End::kStopped ? ErrorKind::kTimeout : ErrorKind::kPeerDied)) {
      problem = "has another error";
    } else if (theirs.culprit != plan.victim) {
      problem = "blames rank " + std::to_string(theirs.culprit);
    } else if (plan.end != End::kStopped &&
               theirs.at_ns - end_ns > kSoon / std::chrono::nanoseconds(1)) {
      problem = "noticed after " + std::to_string((theirs.at_ns - end_ns) / 1'000'000) + " ms";
      is_late = true;
      continue;
    }
    if (!problem.empty())
      problems += "\n    rank " + std::to_string(rank) + " " + problem + ": " + theirs.text.data();
  }
  return problems;
}

// Runs one plan; what went wrong, or nothing.
std::string run_plan(const std::string& folder) {
  for (int tries = 0; tries < kMaxTries; ++tries) {
    new (board) Board;
    std::filesystem::remove_all(folder);
    std::filesystem::create_directory(folder);
    std::vector<pid_t> ranks;
    {
      Meshes meshes = {testing::SocketMesh(plan.world_size), testing::SocketMesh(plan.world_size)};
      for (int rank = 0; rank < plan.world_size; ++rank) {
        ranks.push_back(::fork());
        if (ranks.back() == 0) rank_main(rank, folder, meshes);
        REQUIRE(ranks.back() > 0);  // kill(-1) would be for every process there is
      }
      board->have_all_begun = true;
    }
    const bool is_over = wait_for_reports();
    for (const pid_t pid : ranks) ::kill(pid, SIGKILL);
    for (const pid_t pid : ranks) ::waitpid(pid, nullptr, 0);
    bool is_late = false;
    const std::string problems = judge(is_late);
    if (plan.end == End::kStopped && tries + 1 < kMaxTries && !problems.empty() && is_over) {
      plan.stop_timeout *= 4;
      continue;
    }
    if (!problems.empty() || !is_over)
      return "  " + plan.to_text() + ", " + board->last_step.data() + ":" + problems;
    if (!is_late) return {};
  }
  return "  " + plan.to_text() + ", " + board->last_step.data() + ": noticed too late";
}

// Every `stride`-th step of every rank from `asked` on; how many runs failed.
int run_steps(Plan asked, int stride, const std::string& folder) {
  int num_failed = 0, num_runs = 0;
  const auto run = [&] {
    const std::string failure = run_plan(folder);
    if (failure.empty()) return;
    ++num_failed;
    std::fprintf(stderr, "%s\n", failure.c_str());
  };
  const std::int64_t begin_ns = now_ns();
  for (; asked.victim < asked.world_size; ++asked.victim, asked.step = 0) {
    plan = asked;
    plan.step = 0;
    run();
    const int num_steps = board->num_steps.load();
    for (int step = std::max(asked.step, 1 + asked.victim % stride);
         num_failed < kMaxFailures && step <= num_steps; step += stride) {
      plan.step = step;
      plan.stop_timeout = kStopTimeout;
      run();
      ++num_runs;
    }
  }
  std::fprintf(stderr, "  %d runs of %d ranks over %s, one %s%s: %.1f s\n", num_runs,
               asked.world_size, kOverNames[static_cast<int>(asked.over)],
               kEndNames[static_cast<int>(asked.end)], asked.aborts ? " in an abort" : "",
               static_cast<double>(now_ns() - begin_ns) / 1e9);
  return num_failed;
}

TEST_CASE("child: a rank ends at every step" * doctest::skip()) {
  const char* text = std::getenv(kPlanVariable);
  if (text == nullptr) return;
  int world_size = 0, end = 0, over = 0, aborts = 0, stride = 0;
  int victim = 0, step = 0;  // where to begin
  REQUIRE(std::sscanf(text, "%d %d %d %d %d %d %d", &world_size, &end, &over, &aborts, &stride,
                      &victim, &step) >= 5);
  void* memory =
      ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  board = static_cast<Board*>(memory);
  const std::string folder =
      std::filesystem::temp_directory_path() / ("ringcomm-deaths-" + std::to_string(::getpid()));
  const int num_failed = run_steps({.world_size = world_size,
                                    .victim = victim,
                                    .step = step,
                                    .end = static_cast<End>(end),
                                    .over = static_cast<Over>(over),
                                    .aborts = aborts != 0},
                                   stride, folder);
  std::filesystem::remove_all(folder);
  ::_exit(num_failed == 0 ? 0 : 1);
}

// Every `sample`-th step, or every `whole`-th with RINGCOMM_DEATHS=all; without "many" fewer, and
// with three ranks only.
bool run_child(int world_size, End end, Over over, int sample, bool aborts = false, int whole = 1) {
  if (world_size != 3 && !testing::asks_for("all") && !testing::asks_for("many")) return true;
  const int stride = testing::asks_for("all")              ? whole
                     : aborts || testing::asks_for("many") ? sample
                                                           : 4 * sample;
  const std::string text = std::to_string(world_size) + " " +
                           std::to_string(static_cast<int>(end)) + " " +
                           std::to_string(static_cast<int>(over)) + " " +
                           std::to_string(aborts ? 1 : 0) + " " + std::to_string(stride);
  return testing::status_of_case("--test-case=child: a rank ends*", kPlanVariable, text) == 0;
}

TEST_CASE("deaths: a rank that is killed at any step is named by all others") {
  CHECK(run_child(3, End::kKilled, Over::kMemory, 7));
  CHECK(run_child(2, End::kKilled, Over::kMemory, 17));
  CHECK(run_child(4, End::kKilled, Over::kMemory, 37));
  CHECK(run_child(3, End::kKilled, Over::kMessages, 37));
  CHECK(run_child(2, End::kKilled, Over::kMessages, 41));
  CHECK(run_child(4, End::kKilled, Over::kMessages, 97));
  CHECK(run_child(3, End::kKilled, Over::kHosts, 37));
  CHECK(run_child(4, End::kKilled, Over::kHosts, 97));
}

TEST_CASE("deaths: a rank that replaces itself by exec() at any step is named by all others") {
  CHECK(run_child(3, End::kReplaced, Over::kMemory, 17));
  CHECK(run_child(3, End::kReplaced, Over::kMessages, 149));
  CHECK(run_child(3, End::kReplaced, Over::kHosts, 149));
}

TEST_CASE("deaths: a rank that stops at any step is a time-out that names it") {
  CHECK(run_child(3, End::kStopped, Over::kMemory, 83));
  CHECK(run_child(3, End::kStopped, Over::kMessages, 149));
  CHECK(run_child(3, End::kStopped, Over::kHosts, 149));
}

TEST_CASE("deaths: a rank that ends while it aborts the group") {
  for (const Over over : {Over::kMemory, Over::kMessages, Over::kHosts})
    CHECK(run_child(3, End::kKilled, over, 1, true));
}

TEST_CASE("deaths: ranks that end after their last call are no failure of a late one") {
  for (const Over over : {Over::kMemory, Over::kMessages, Over::kHosts}) {
    CHECK(run_child(3, End::kLateForGroup, over, 5));
    CHECK(run_child(3, End::kLateForCalls, over, 7));
  }
  CHECK(run_child(4, End::kLateForGroup, Over::kHosts, 23));
}

// Every seventh step: all of them take an hour and a half more, in a second each for a stopped
// rank.
TEST_CASE("deaths: whatever the number of ranks" * doctest::skip(!testing::asks_for("all"))) {
  for (const End end : {End::kReplaced, End::kStopped})
    for (const int world_size : {2, 4})
      for (const Over over : {Over::kMemory, Over::kMessages, Over::kHosts})
        if (world_size > 2 || over != Over::kHosts)
          CHECK(run_child(world_size, end, over, 7, false, 7));
}

}  // namespace
