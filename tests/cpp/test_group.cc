// Groups: how ranks find each other, their errors if they cannot, and what remains afterwards.
#include <sched.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "children.h"
#include "core/annotations.h"
#include "folder_store.h"
#include "host/fd.h"
#include "host/group.h"
#include "host/host_arch.h"
#include "host/process.h"
#include "host/rank_record.h"
#include "host/shared_arena.h"
#include "host/shared_memory.h"
#include "host/timed_store.h"
#include "host/unix_socket.h"
#include "host/wait.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"
#include "transport/messages/message_group.h"

namespace {
thread_local bool gets_pages = true, fetches_late = false, has_huge_pages = true;
thread_local int num_refused = 0;  // huge pages
}  // namespace

extern "C" {
int __real_madvise(void* begin, std::size_t num_bytes, int advice);

int __wrap_madvise(void* begin, std::size_t num_bytes, int advice) {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE
  if (!has_huge_pages && advice == MADV_HUGEPAGE) {
    ++num_refused;
    errno = EINVAL;  // as a kernel without huge pages
    return -1;
  }
  if (gets_pages || advice != kPopulateWrite) return __real_madvise(begin, num_bytes, advice);
  errno = EFAULT;
  return -1;
}
}

namespace {

using namespace ringcomm;
using namespace ringcomm::host;
using namespace ringcomm::testing;
using std::chrono::milliseconds;
using testing::error_of;

constexpr int kCannotUnshare = 77;

GroupTerms identity(int rank, int world_size, const std::string& options = "o=1") {
  return {.rank = rank, .world_size = world_size, .options = options};
}

Group make_group(KeyValueStore& store, const GroupTerms& terms,
                 milliseconds timeout = testing::kBound, const SegmentConfig& config = {}) {
  return testing::make_group(store, terms, config, timeout);
}

/// Waits until every rank has come to this place, with the same value.
void meet(MemoryStore& store, int rank, int world_size, const std::string& place = "met",
          const std::string& value = "") {
  store.set(place + std::to_string(rank), value);
  std::string theirs;
  for (int peer = 0; peer < world_size; ++peer)
    expect(store.get(place + std::to_string(peer), testing::kBound, theirs) && theirs == value,
           "all ranks have one value");
}

// Of a group of two of this process, which offers no memory.
RankRecord record_of_rank_0() {
  MemoryStore store;
  Rendezvous rendezvous(store, identity(0, 1), testing::kBound);
  rendezvous.find_ranks();
  RankRecord record = rendezvous.mine();
  record.world_size = 2;
  record.written_ms = 0;  // before this process began
  return record;
}

// Machines that are copies of one image: equal boots and namespaces, and no socket reaches the
// other. Here threads with a network each are in one process, whose name is that of its first
// thread. In a process of its own, which has watched no rank yet.
TEST_CASE("child: ranks whose sockets do not reach each other" * doctest::skip()) {
  const auto meet = [](const std::string& host_id) {
    MemoryStore store;
    std::array<std::string, 2> results;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank)
      threads.emplace_back([&, rank] {
        if (::unshare(CLONE_NEWNET) != 0) ::_exit(kCannotUnshare);
        GroupTerms mine = identity(rank, 2);
        if (!host_id.empty()) mine.host_id = host_id + std::to_string(rank);
        auto& result = results[static_cast<std::size_t>(rank)];
        try {
          mine.is_one_host = false;
          Rendezvous rendezvous(store, mine, testing::kBound);
          result = std::to_string(rendezvous.find_ranks().num_hosts()) + " hosts";
        } catch (const Error& error) {
          result = error.what();
        }
      });
    for (std::thread& thread : threads) thread.join();
    return results;
  };
  Bootstrap::instance();  // in the network of the first thread
  for (const std::string& result : meet("")) {
    CHECK(result.find("has the host identity of this rank") != std::string::npos);
    CHECK(result.find("set RINGCOMM_HOST_ID to another value") != std::string::npos);
  }
  for (const std::string& result : meet("host ")) CHECK(result == "2 hosts");
}

#if !defined(__SANITIZE_THREAD__)  // which lets no thread start in a child of a threaded program
TEST_CASE("machines with one identity are told apart by their sockets") {
  const int status = testing::status_of_case("--test-case=child: ranks whose*");
  if (status == kCannotUnshare)
    MESSAGE("skipped: this user may not make network namespaces");
  else
    CHECK(status == 0);
}
#endif

#if !defined(__SANITIZE_THREAD__)  // as above
// On which core each rank is, of those that this process may use; -1 for all of them.
int ranks_per_core_of_processes(const std::vector<int>& cores_of_ranks) {
  cpu_set_t allowed;
  REQUIRE(::sched_getaffinity(0, sizeof(allowed), &allowed) == 0);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  const std::string folder = std::filesystem::temp_directory_path() / ("ringcomm-" + random_text());
  std::filesystem::create_directory(folder);
  std::vector<pid_t> pids;
  const int world_size = static_cast<int>(cores_of_ranks.size());
  for (int rank = 0; rank < world_size; ++rank) {
    pids.push_back(::fork());
    REQUIRE(pids.back() >= 0);
    if (pids.back() > 0) continue;
    ::alarm(60);
    if (const int place = cores_of_ranks[static_cast<std::size_t>(rank)]; place >= 0) {
      cpu_set_t only;
      CPU_ZERO(&only);
      CPU_SET(cores.at(static_cast<std::size_t>(place)), &only);
      if (::sched_setaffinity(0, sizeof(only), &only) != 0) ::_exit(103);
    }
    testing::FolderStore store(folder, [] {});
    try {
      const Group group = make_group(store, identity(rank, world_size));
      ::_exit(CoreShare::most_ranks_per_core());
    } catch (const std::exception&) {
      ::_exit(104);
    }
  }
  std::vector<int> codes;
  for (const pid_t pid : pids) codes.push_back(testing::end_of(pid));
  std::filesystem::remove_all(folder);
  for (const int code : codes) REQUIRE((code > 0 && code < 100));
  for (const int code : codes) CHECK(code == codes.front());
  return codes.front();
}

// Launchers have pinned two ranks to one core,
// https://github.com/flux-framework/flux-sched/issues/1413, and libgomp all of them to the first
// one, https://github.com/vllm-project/vllm-ascend/pull/11307.
TEST_CASE("processes that are pinned to cores of their own share none") {
  cpu_set_t allowed;
  REQUIRE(::sched_getaffinity(0, sizeof(allowed), &allowed) == 0);
  const auto& quota = cgroup_limits().cpu_cores;
  if (CPU_COUNT(&allowed) < 2 || (quota && quota->value < 2)) {
    MESSAGE("skipped: one core");
    return;
  }
  CHECK(ranks_per_core_of_processes({0, 1}) == 1);
  CHECK(ranks_per_core_of_processes({1, -1}) == 2);  // equal shares: of core 1 a half each
  CHECK(ranks_per_core_of_processes({0, 0}) == 2);
  CHECK(ranks_per_core_of_processes({0, 1, 1, 1}) == 3);
  CHECK(ranks_per_core_of_processes(
            std::vector<int>(static_cast<std::size_t>(CPU_COUNT(&allowed)) + 1, -1)) == 2);
}
#endif

// Elsewhere a pool of huge pages that runs dry is a SIGBUS,
// https://github.com/chapel-lang/chapel/issues/8801.
TEST_CASE("shared buffers have ordinary pages where huge ones are refused") {
  has_huge_pages = false;
  SharedArena arena;
  auto* block = static_cast<std::byte*>(arena.allocate(std::size_t{3} << 20));
  std::memset(block, 5, std::size_t{3} << 20);
  CHECK(block[(std::size_t{3} << 20) - 1] == std::byte{5});
  arena.deallocate(block);
  CHECK(num_refused == 1);
  has_huge_pages = true;
}

// Elsewhere each communicator keeps what it has used once,
// https://github.com/NVIDIA/nccl/issues/964.
TEST_CASE("an idle group returns its data's pages when no peer can read them") {
  MemoryStore store;
  std::vector<std::unique_ptr<Group>> groups(3);
  run_threads(3, [&](int rank) {
    groups[static_cast<std::size_t>(rank)].reset(new Group(make_group(store, identity(rank, 3))));
  });
  Group& own = *groups[0];
  const auto middle = [&](int rank) -> std::byte& {
    return own.board().region(rank, 1)[own.board().region_bytes / 2];
  };
  std::uint64_t seq = 0;
  const auto begin_call = [&] {
    for (int rank = 0; rank < 3; ++rank) middle(rank) = std::byte{7};
    for (const auto& group : groups)
      if (group != nullptr) group->record_call(seq);
    ++seq;
  };
  const auto is_kept = [&] {
    own.return_idle_pages();
    return middle(0) == std::byte{7};
  };
  begin_call();
  CHECK(is_kept());
  CHECK(is_kept());  // in the call
  own.record_end();
  groups[1]->record_end();
  CHECK(is_kept());  // there was a call
  CHECK(is_kept());  // a peer is in it
  groups[2]->record_end();
  CHECK(!is_kept());
  for (int rank = 1; rank < 3; ++rank) CHECK(middle(rank) == std::byte{7});  // are the peers'
  begin_call();
  own.record_end();
  groups[2]->record_end();
  CHECK(is_kept());
  groups[1].reset();
  CHECK(!is_kept());  // it has left
  begin_call();       // and fails here
  groups[2]->record_end();
  CHECK(is_kept());
  CHECK(is_kept());
}

TEST_CASE("ranks of a group see the same memory and each other's lives") {
  MemoryStore store;
  std::atomic<int> num_left = 0;
  run_threads(3, [&](int rank) {
    Group group = make_group(store, identity(rank, 3));
    expect(group.process_of((rank + 1) % 3).pid == ::getpid(), "the peer's pid");
    GroupWait scope(group);
    HostArch arch(scope, 0);
    scope.begin(testing::kPatient);
    Board<HostArch> board(arch, group.board(), rank);
    std::byte* region = nullptr;
    expect(board.open(region) == WaitStatus::kNone, "an open region");
    region[0] = static_cast<std::byte>(rank + 1);
    board.publish();
    for (int peer = 0; peer < 3; ++peer) {
      const std::byte* read = nullptr;
      if (peer == rank) continue;
      expect(board.wait(peer, read) == WaitStatus::kNone, "a published region");
      expect(read[0] == static_cast<std::byte>(peer + 1), "the peer's byte");
    }
    board.publish();
    for (int peer = 0; peer < 3; ++peer) {
      const std::byte* read = nullptr;
      if (peer != rank) expect(board.wait(peer, read) == WaitStatus::kNone, "all have read");
    }
    ++num_left;
  });
  CHECK(num_left == 3);
}

// Groups of other ranks under one name: https://github.com/pytorch/pytorch/issues/130102, where
// they are connected.
TEST_CASE("ranks that are told different things about their group get both texts, on every rank") {
  const auto expect_both = [](int world_size, const auto& terms_of, ErrorKind kind,
                              const std::vector<std::string>& texts) {
    MemoryStore store;
    run_threads(world_size, [&](int rank) {
      expect_error(error_of([&] { make_group(store, terms_of(rank)); }), kind, texts);
    });
  };
  expect_both(4,
              [](int rank) { return identity(rank, 4, rank == 2 ? "num_slots=3" : "num_slots=2"); },
              ErrorKind::kMismatch, {"{num_slots=2}", "{num_slots=3}", "rank 2"});
  expect_both(2,
              [](int rank) {
                GroupTerms mine = identity(rank, 2);
                mine.global_ranks = {rank == 0 ? 0U : 1U, rank == 0 ? 3U : 2U};
                return mine;
              },
              ErrorKind::kMismatch, {"groups of different ranks", "{0, 3}", "{1-2}"});
  expect_both(2,
              [](int rank) {
                GroupTerms mine = identity(rank, 2);
                mine.host_id = rank == 0 ? "here" : "elsewhere";
                mine.is_one_host = true;
                return mine;
              },
              ErrorKind::kSystem, {"share no memory", "[here]", "[elsewhere]"});
}

TEST_CASE("different numbers of ranks are a mismatch that says both") {
  MemoryStore store;
  run_threads(2, [&](int rank) {
    expect_error(error_of([&] { make_group(store, identity(rank, 2 + rank)); }),
                 ErrorKind::kMismatch,
                 {rank == 0 ? "2 and 3 ranks" : "3 and 2 ranks", "the same world size"});
  });
}

TEST_CASE("a rank that the default group numbers otherwise is named by both numbers") {
  MemoryStore store;
  GroupTerms mine = identity(1, 4);
  mine.global_ranks = {4, 5, 6, 9};
  expect_error(error_of([&] { make_group(store, mine, milliseconds(20)); }), ErrorKind::kTimeout,
               {"ringcomm rank 1/4 (global rank 5): ",
                "ranks 0, 2 and 3 of the group (global ranks 4, 6 and 9) did not join"});
}

// Its process lives on. Reported at https://github.com/rwth-i6/returnn/issues/1484.
TEST_CASE("a rank that fails to make a group is heard by all others, and they may try again") {
  MemoryStore store;
  const auto begin = std::chrono::steady_clock::now();
  for (int attempt = 0; attempt < 3; ++attempt) {
    run_threads(3, [&](int rank) {
      // The first rank, the one with the memory, and one that others do not wait for.
      const bool fails = rank == 2 - attempt;
      GroupTerms mine = identity(rank, 3);
      mine.global_ranks = {3, 1, 2};
      std::this_thread::sleep_for(milliseconds((rank + attempt) % 3 * 20));
      Rendezvous rendezvous(store, mine, testing::kBound);
      if (fails) {
        rendezvous.report_failure(Error({.kind = ErrorKind::kSystem, .rank = rank}, "no room"));
        return;
      }
      const Error error = error_of([&] { make_group(store, mine); });
      expect_error(error, ErrorKind::kSystem, {"rank " + std::to_string(2 - attempt), "no room"});
      expect(error.info().rank == 2 - attempt, "the rank that has failed to be blamed");
    });
  }
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(30));
  run_threads(3, [&](int rank) {  // what failed before is no reason
    std::this_thread::sleep_for(milliseconds(rank * 50));
    GroupTerms mine = identity(rank, 3);
    mine.global_ranks = {3, 1, 2};
    const Group group = make_group(store, mine);
    meet(store, rank, 3);
  });
}

TEST_CASE("a rank that does not come is a time-out that names it, and it alone") {
  for (const int missing : {0, 2, 4}) {
    MemoryStore store;
    std::atomic<int> num_here = 0;
    run_threads(5, [&](int rank) {
      if (rank == missing) return;
      ++num_here;  // one that came after another's time-out would name that one
      testing::wait_until([&] { return num_here == 4; }, "the other threads");
      const Error error =
          error_of([&] { make_group(store, identity(rank, 5), milliseconds(3000)); });
      expect_error(error, ErrorKind::kTimeout,
                   {"rank " + std::to_string(missing) + " did not join the group in 3000 ms",
                    "start 5 ranks"});
      expect(error.info().rank == missing, "the missing rank");
    });
  }
}

// Counts requests, and gives those of one rank the answer that they wait for at the first time.
class CountingStore final : public KeyValueStore {
 public:
  CountingStore(MemoryStore& whole, int rank, int world_size, std::atomic<int>& num_requests)
      : whole_(whole), rank_(rank), world_size_(world_size), num_requests_(num_requests) {}

  void set(const std::string& key, const std::string& value) override {
    ++num_requests_;
    has_set_ = true;
    whole_.set(key, value);
  }
  void set_first(const std::string& key, const std::string& value) override {
    ++num_requests_;
    whole_.set_first(key, value);
  }
  std::optional<std::string> try_get(const std::string& key) override {
    ++num_requests_;
    std::string value;
    if (!has_set_) return {};  // how often it has tried, and the records of earlier groups
    // Rank 0 names a group over messages to a rank whose entry is not there.
    if (rank_ == 0 && key.starts_with("ringcomm/messages/") && entries_.insert(key).second)
      return {};
    const bool is_own = key == "ringcomm/rank/" + std::to_string(rank_);
    for (int rank = 0; rank < world_size_ && !is_own; ++rank)
      whole_.get("ringcomm/rank/" + std::to_string(rank), testing::kBound, value);
    return whole_.get(key, is_own ? milliseconds(0) : testing::kBound, value) ? std::optional(value)
                                                                              : std::nullopt;
  }
  std::unique_ptr<KeyValueStore> clone() override { return std::make_unique<CountingStore>(*this); }

 private:
  MemoryStore& whole_;
  int rank_;
  int world_size_;
  std::atomic<int>& num_requests_;
  bool has_set_ = false;
  std::set<std::string> entries_;  // asked for
};

// The requests of ranks that find each other, and then make a group over messages or in memory.
int num_requests_of(int world_size, bool is_one_host) {
  MemoryStore store;
  std::atomic<int> num_requests = 0;
  run_threads(world_size, [&](int rank) {
    CountingStore counting(store, rank, world_size, num_requests);
    GroupTerms terms = identity(rank, world_size);
    terms.is_one_host = is_one_host;
    Rendezvous rendezvous(counting, terms, testing::kBound);
    const PeerTable peer_table = rendezvous.find_ranks();
    if (!is_one_host)
      return meet(store, rank, world_size, "met", MessageGroup(counting, rendezvous).key());
    expect(peer_table.num_ranks_on(0) == world_size, "all ranks on this host");
    for (int peer = 0; peer < world_size; ++peer)
      expect(rendezvous.record_of(peer).pid == ::getpid(), "each peer's record");
    meet(store, rank, world_size);
  });
  return num_requests;
}

// Of Gloo: 0.4 s for 2 ranks and 15.8 s for 16, https://github.com/horovod/horovod/issues/3556; and
// no group of more than 150 ranks, https://github.com/pytorch/pytorch/issues/59256.
TEST_CASE("ranks find each other in a number of requests that grows as theirs") {
  // Of each rank: how often it has tried, its record, rank 0's two looks at it, its at rank 0 and
  // at the table.
  for (const int world_size : {2, 8, 64, 160})
    CHECK(num_requests_of(world_size, true) <= 7 * world_size);
}

TEST_CASE("ranks make a group over messages in a number of requests that grows as theirs") {
  // Those above; of each rank its name, its entry and all of them; of rank 0, for each rank, its
  // record and its entry twice, and its name. A busy machine adds looks at up to 16 records.
  for (const int world_size : {2, 8, 64, 160})
    CHECK(num_requests_of(world_size, false) <= 40 * world_size);
}

TEST_CASE("a table of an earlier group of the same ranks is not taken for this one's") {
  MemoryStore store;
  for (int turn = 0; turn < 2; ++turn)
    run_threads(3, [&](int rank) {
      if (rank == 0) std::this_thread::sleep_for(milliseconds(50));
      const Group group = make_group(store, identity(rank, 3));
      meet(store, rank, 3, "made" + std::to_string(turn) + "/", group.key());
    });
}

TEST_CASE("two processes with one rank get an error that says so") {
  MemoryStore store;
  const Error error = error_of([&] {
    std::thread twin([&] {
      std::this_thread::sleep_for(milliseconds(50));
      store.set("ringcomm/rank/0", "of another process");
    });
    try {
      make_group(store, identity(0, 2), milliseconds(1000));
    } catch (...) {
      twin.join();
      throw;
    }
    twin.join();
  });
  expect_error(error, ErrorKind::kTimeout,
               {"rank 1 did not join", "another process joined as rank 0 too"});
}

// As where rank 1 waits for rank 2 itself.
TEST_CASE("a wait that takes too long blames the rank that has published least") {
  MemoryStore store;
  run_threads(3, [&](int rank) {
    Group group = make_group(store, identity(rank, 3));
    GroupWait scope(group);
    HostArch arch(scope, 0);
    Board<HostArch> board(arch, group.board(), rank);
    if (rank < 2) board.publish();
    meet(store, rank, 3, "published");
    if (rank == 0) {
      const WaitLimits limits = testing::within(milliseconds(1));
      scope.begin(limits);
      testing::wait_until([&] { return scope.check(1) == WaitStatus::kTimeout; }, "a time-out");
      expect(scope.awaited_peer() == 2, "rank 2 to be blamed");
    }
    meet(store, rank, 3, "over");
  });
}

// A store whose process is asked to stop after a while.
class InterruptedStore final : public testing::ForwardingStore {
 public:
  InterruptedStore(MemoryStore& whole, milliseconds delay)
      : ForwardingStore(whole), end_(std::chrono::steady_clock::now() + delay) {}
  bool is_interrupted() override { return std::chrono::steady_clock::now() > end_; }

 private:
  std::chrono::steady_clock::time_point end_;
};

TEST_CASE("a signal ends the making of a group, whatever the rank waits for") {
  const auto expect_interrupted = [](KeyValueStore& store, int rank) {
    const Error error =
        error_of([&] { make_group(store, identity(rank, 2), std::chrono::minutes(30)); });
    expect_error(error, ErrorKind::kInterrupted, {"interrupted by a signal"});
  };
  {
    MemoryStore store;  // for the record of the other
    InterruptedStore interrupted(store, milliseconds(100));
    expect_interrupted(interrupted, 0);
  }
  // The record of rank 0 of an earlier group of two: its bootstrap no longer offers memory.
  const auto leave_record = [](KeyValueStore& store, const std::string& bootstrap_address) {
    RankRecord record = record_of_rank_0();
    if (!bootstrap_address.empty()) record.bootstrap_address = bootstrap_address;
    store.set("ringcomm/rank/0", record.to_text());
  };
  {
    MemoryStore store;  // for memory, and then for a rank
    leave_record(store, "");
    InterruptedStore interrupted(store, milliseconds(100));
    expect_interrupted(interrupted, 1);
    InterruptedStore again(store, milliseconds(100));
    expect_interrupted(again, 0);
  }
  {
    MemoryStore store;  // for memory that a bootstrap that has stopped does not send
    const std::string name = "ringcomm-test-silent-" + std::to_string(::getpid());
    const UniqueFd silent = listen_at(name);
    leave_record(store, name);
    InterruptedStore interrupted(store, milliseconds(200));
    expect_interrupted(interrupted, 1);
  }
}

TEST_CASE("a rank that ends before it has answered is named at once") {
  static UniqueFd listener;
  MemoryStore store;
  const std::string name = "ringcomm-test-ends-" + std::to_string(::getpid());
  listener = listen_at(name);
  RankRecord record = record_of_rank_0();
  record.bootstrap_address = name;
  store.set("ringcomm/rank/0", record.to_text());
  const auto make = [&] { return error_of([&] { make_group(store, identity(1, 2)); }); };
  SUBCASE("as soon as the other rank has connected") {
    test_step = [](const char* what) {
      if (std::string(what) == "before a request") listener.reset();
    };
    const Error error = make();
    test_step = nullptr;
    expect_error(error, ErrorKind::kPeerDied, {"rank 0"});
  }
  SUBCASE("once the other rank has asked") {
    std::thread ends([&] {
      const UniqueFd connection(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      is_readable(connection.get(), testing::kBound);
      listener.reset();
    });
    const Error error = make();
    ends.join();
    expect_error(error, ErrorKind::kPeerDied, {"rank 0"});
  }
}

// A record whose process has ended: no bootstrap has that name.
RankRecord record_of_ended(int world_size) {
  RankRecord record = record_of_rank_0();
  record.bootstrap_address = "ringcomm-ended ask answer";
  record.world_size = world_size;
  return record;
}

// Reported for torch's own at https://github.com/pytorch/pytorch/issues/55967 and 135712.
TEST_CASE("what is there at a rank's first look is of an earlier group, however late others are") {
  RankRecord timed_out = record_of_rank_0();
  timed_out.failure = {.kind = ErrorKind::kTimeout, .origin = 0, .culprit = 1, .text = "no rank 1"};
  timed_out.written_ms = time_ms();
  RankRecord failed = record_of_ended(2);
  failed.failure = {.kind = ErrorKind::kSystem, .origin = 0, .culprit = 0, .text = "no room"};
  for (const RankRecord& old :
       {record_of_rank_0(), record_of_ended(2), record_of_ended(3), timed_out, failed}) {
    MemoryStore store;
    store.set("ringcomm/rank/0", old.to_text());
    run_threads(2, [&](int rank) {
      // Longer than a new record is unverified.
      if (rank == 0) std::this_thread::sleep_for(milliseconds(1300));
      const Group group = make_group(store, identity(rank, 2));
      expect(group.state_of(1 - rank) == WaitStatus::kNone, "the peer of this group");
      meet(store, rank, 2);
    });
  }
}

// Of earlier attempts, but for the last one: that has ended since this rank looked first.
TEST_CASE("what the record of another rank says is in the error of a rank that waits for it") {
  RankRecord ended = record_of_ended(2);
  ended.written_ms = time_ms();
  const struct {
    int peer;
    RankRecord record;
    milliseconds timeout;
    ErrorKind kind;
    std::vector<std::string> texts;
  } cases[] = {
      {1,
       record_of_ended(3),
       milliseconds(200),
       ErrorKind::kTimeout,
       {"rank 1 did not join", "its record, perhaps of an earlier attempt", "2 and 3 ranks"}},
      {0,
       record_of_rank_0(),
       milliseconds(100),
       ErrorKind::kTimeout,
       {"rank 0 did not send the shared-memory descriptor", "100 ms"}},
      {0,
       ended,
       testing::kBound,
       ErrorKind::kPeerDied,
       {"rank 0", "died while the group was made"}},
  };
  for (const auto& [peer, record, timeout, kind, texts] : cases) {
    MemoryStore store;
    store.set("ringcomm/rank/" + std::to_string(peer), record.to_text());
    expect_error(error_of([&, peer = peer, timeout = timeout] {
                   make_group(store, identity(1 - peer, 2), timeout);
                 }),
                 kind, texts);
  }
}

TEST_CASE("the ranks of a group that is made leave no records, and those that fail leave theirs") {
  MemoryStore store;
  run_threads(2, [&](int rank) {
    const Communicator communicator(store, rank, 2, {}, testing::kBound);
    expect(store.try_get("ringcomm/rank/" + std::to_string(rank)) == "", "no record");
  });
  expect_error(error_of([&] { make_group(store, identity(0, 2), milliseconds(1)); }),
               ErrorKind::kTimeout, {"rank 1 did not join"});
  CHECK(!RankRecord::from_text(store.try_get("ringcomm/rank/0").value()).failure.text.empty());
}

TEST_CASE("memory of another size is refused") {
  MemoryStore store;
  run_threads(2, [&](int rank) {
    const SegmentConfig config{.board_region_bytes = rank == 0 ? std::size_t{1} << 20 : 1 << 16};
    const Error error =
        error_of([&] { testing::make_group(store, identity(rank, 2), config, testing::kBound); });
    expect_error(error, ErrorKind::kMismatch, {"does not have the size"});
    if (rank == 0) expect_error(error, ErrorKind::kMismatch, {"rank 1", "failed: "});
  });
}

TEST_CASE("memory that the system refuses to one rank is an error on all, with rank and bytes") {
  const bool before = may_refuse_pages().exchange(true);
  test_step = [](const char* what) {
    if (fetches_late && std::string(what) == "before a request")
      std::this_thread::sleep_for(milliseconds(50));
  };
  for (int refused = 0; refused < 3; ++refused) {
    MemoryStore store;
    run_threads(3, [&](int rank) {
      gets_pages = rank != refused;
      fetches_late = rank == 2;
      const Error error = error_of([&] {
        Communicator communicator(store, rank, 3, {}, testing::kBound);
        testing::barrier(communicator);
      });
      const std::string peer = rank == refused ? "" : ": rank " + std::to_string(refused) + " ";
      expect_error(error, ErrorKind::kSystem,
                   {"taking " + std::to_string(4 * page_bytes()) + " bytes of shared memory",
                    "Cannot allocate memory", peer});
    });
  }
  test_step = nullptr;
  may_refuse_pages() = before;
}

TEST_CASE("what a rank throws as it joins, such as a store's error, ends the group on all") {
  thread_local bool fails = false;
  test_step = [](const char* what) {
    if (fails && std::string(what) == "after a rank has joined")
      throw std::runtime_error("no store");
  };
  MemoryStore store;
  run_threads(3, [&](int rank) {
    fails = rank == 1;
    const auto join = [&] {
      Communicator communicator(store, rank, 3, {}, testing::kBound);
      testing::barrier(communicator);  // has the reason where all had joined
    };
    if (rank == 1)
      CHECK_THROWS_WITH_AS(join(), "no store", std::runtime_error);
    else
      expect_error(error_of(join), ErrorKind::kAborted, {"rank 1", "no store"});
  });
  test_step = nullptr;
}

// A store from which a rank reads rank 0's record only once that tells of a failure.
class LateReader final : public testing::ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  std::optional<std::string> try_get(const std::string& key) override {
    auto value = ForwardingStore::try_get(key);
    const bool is_early =
        value && key == "ringcomm/rank/0" && RankRecord::from_text(*value).failure.text.empty();
    return is_early ? std::nullopt : value;
  }
};

TEST_CASE("a rank that meets rank 0 only after its failure reads the reason") {
  MemoryStore store;
  run_threads(2, [&](int rank) {
    LateReader late(store);
    Rendezvous rendezvous(rank == 0 ? static_cast<KeyValueStore&>(store) : late, identity(rank, 2),
                          testing::kBound);
    if (rank == 0) {
      rendezvous.find_ranks();
      rendezvous.report_failure(Error({.kind = ErrorKind::kSystem, .rank = 0}, "no room"));
      return;
    }
    expect_error(error_of([&] { rendezvous.find_ranks(); }), ErrorKind::kSystem,
                 {"rank 0", "failed: no room"});
  });
}

TEST_CASE("an aborted group gives the first reason to all ranks") {
  MemoryStore store;
  run_threads(2, [&](int rank) {
    std::unique_ptr<Group> group(new Group(make_group(store, identity(rank, 2))));
    std::string ignored;
    if (rank == 0) {
      group->abort({.kind = ErrorKind::kTimeout, .origin = 0, .culprit = 1, .text = "first"});
      group->abort({.kind = ErrorKind::kMismatch, .origin = 1, .culprit = 0, .text = "second"});
      group.reset();
      store.set("left", "");
      return;
    }
    expect(store.get("left", testing::kBound, ignored), "the peer's end");
    expect(group->state_of(0) == WaitStatus::kAborted && group->state_of(1) == WaitStatus::kAborted,
           "an aborted group, whomever one waits for, though its maker has left");
    const AbortReason reason = group->abort_reason();
    expect(reason.kind == ErrorKind::kTimeout && reason.origin == 0 && reason.culprit == 1 &&
               reason.text == "first",
           "the first reason");
  });
}

TEST_CASE("only the rank that has left is missing for the others") {
  MemoryStore store;
  run_threads(3, [&](int rank) {
    std::unique_ptr<Group> group(new Group(make_group(store, identity(rank, 3))));
    std::string ignored;
    if (rank == 1) {
      group.reset();
      store.set("left", "");
      return;
    }
    expect(store.get("left", testing::kBound, ignored), "the peer's end");
    expect(group->state_of(1) == WaitStatus::kPeerLeft, "rank 1 gone");
    expect(group->state_of(rank) == WaitStatus::kNone, "this rank there");
    store.set("seen" + std::to_string(rank), "");
    expect(store.get("seen" + std::to_string(2 - rank), testing::kBound, ignored), "the other");
  });
}

TEST_CASE("a long reason is cut and ends") {
  MemoryStore store;
  Group group = make_group(store, identity(0, 1));
  group.abort({.text = std::string(5000, 'x')});
  CHECK(group.state_of(0) == WaitStatus::kAborted);
  CHECK(group.abort_reason().text == std::string(1023, 'x'));
}

TEST_CASE("groups leave no descriptor and no thread behind, nor do those that fail to form") {
  const auto make_and_use = [] {
    testing::run_ranks(3, [](Communicator& communicator) { testing::barrier(communicator); });
  };
  const auto fail = [] {
    MemoryStore store;
    error_of([&] { make_group(store, identity(0, 2), milliseconds(1)); });
  };
  make_and_use();  // the first makes the bootstrap, its thread, and its watch of this process
  const std::size_t num_fds = num_entries("/proc/self/fd");
  const std::size_t num_threads = num_entries("/proc/self/task");
  for (int i = 0; i < 15; ++i) make_and_use();
  for (int i = 0; i < 20; ++i) fail();
  // The bootstrap closes its ends when it gets round to it.
  testing::wait_until([&] { return num_entries("/proc/self/fd") <= num_fds; },
                      "as many descriptors as before", std::chrono::seconds(10));
  testing::wait_until([&] { return num_entries("/proc/self/task") <= num_threads; },
                      "as many threads as before", std::chrono::seconds(10));
}

}  // namespace
