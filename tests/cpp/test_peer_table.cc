// Ranks and their hosts, and the transport that a group chooses.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "host/rank_record.h"
#include "host/rendezvous.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using std::chrono::milliseconds;
using testing::error_of;
using testing::expect;
using testing::expect_error;
using testing::MemoryStore;
using testing::run_threads;

PeerTable peer_table_of(const std::vector<std::string>& hosts) {
  std::vector<RankRecord> records;
  for (const std::string& host : hosts)
    records.push_back({.host_id = "id-" + host,
                       .host = host,
                       .bootstrap_address = {},
                       .pid = 1,
                       .memory_key = {},
                       .options = {}});
  return PeerTable(records);
}

TEST_CASE("ranks lie on hosts in any order") {
  const PeerTable peer_table = peer_table_of({"b", "a", "b", "c", "a", "b"});
  CHECK(peer_table.num_hosts() == 3);
  CHECK(peer_table.ranks_on(0) == std::vector<int>{0, 2, 5});
  CHECK(peer_table.ranks_on(1) == std::vector<int>{1, 4});
  CHECK(peer_table.ranks_on(2) == std::vector<int>{3});
  for (int host = 0; host < peer_table.num_hosts(); ++host)
    for (int local = 0; local < peer_table.num_ranks_on(host); ++local) {
      const int rank = peer_table.ranks_on(host)[static_cast<std::size_t>(local)];
      CHECK(peer_table.host_of(rank) == host);
      CHECK(peer_table.local_rank_of(rank) == local);
    }
  CHECK(peer_table.leader_of(1) == 1);
  CHECK(peer_table.describe() == "3 hosts: b (ranks 0 2 5), a (ranks 1 4), c (rank 3)");
  CHECK(peer_table_of({"x", "x"}).describe() == "1 host: x (ranks 0 1)");
}

host::GroupTerms terms(int rank, int world_size, const std::string& host,
                       const std::string& options = "o=1", bool shares_memory = false) {
  return {.rank = rank,
          .world_size = world_size,
          .options = options,
          .host_id = host,
          .shares_memory = shares_memory,
          .is_one_host = false};
}

// As of a group: the others hear of an error.
void find_or_report(MemoryStore& store, const host::GroupTerms& mine) {
  host::Rendezvous rendezvous(store, mine, testing::kBound);
  try {
    rendezvous.find_ranks();
  } catch (const Error& error) {
    rendezvous.report_failure(error);
    throw;
  }
}

TEST_CASE("ranks of several hosts find each other, the same on all ranks") {
  MemoryStore store;
  const std::vector<std::string> hosts{"a", "b", "a", "c"};
  run_threads(4, [&](int rank) {
    host::Rendezvous rendezvous(
        store, terms(rank, 4, hosts[static_cast<std::size_t>(rank)], "o=1", true), testing::kBound);
    const PeerTable peer_table = rendezvous.find_ranks();
    expect(peer_table.num_hosts() == 3 && peer_table.ranks_on(0) == std::vector<int>{0, 2},
           "the hosts: " + peer_table.describe());
  });
}

TEST_CASE("of ranks that are waited for, only those that have not come are named") {
  MemoryStore store;
  run_threads(4, [&](int rank) {
    host::Rendezvous rendezvous(store, terms(rank, 4, "here"), milliseconds(1'000));
    rendezvous.find_ranks();
    const Error error =
        error_of([&] { rendezvous.wait_for_all([](int peer) { return peer % 2 == 0; }); });
    const bool is_odd = rank % 2 == 1;
    expect_error(error, ErrorKind::kTimeout,
                 {is_odd ? (rank == 1 ? ": rank 3 did not join" : ": rank 1 did not join")
                         : ": ranks 1 and 3 did not join"});
  });
}

TEST_CASE("the ranks that do not fetch the memory of their host are named") {
  MemoryStore store;
  run_threads(4, [&](int rank) {
    if (rank < 2) {
      const Error error = error_of([&] {
        testing::make_group(store, {.rank = rank, .world_size = 4}, {}, milliseconds(1'000));
      });
      return expect_error(error, ErrorKind::kTimeout,
                          {"ranks 2 and 3 did not map the shared-memory descriptor in 1000 ms"});
    }
    host::Rendezvous rendezvous(store, {.rank = rank, .world_size = 4}, milliseconds(5'000));
    rendezvous.find_ranks();
    std::this_thread::sleep_for(milliseconds(2'000));
  });
}

// As where rank 0 waits in another group for rank 2, which is stopped. Neither has a record.
TEST_CASE("a rank that another group knows to be stopped is named, and not one that waits for it") {
  MemoryStore store;
  host::GroupTerms mine = terms(1, 3, "here");
  const pid_t pid = ::fork();
  if (pid == 0)
    for (;;) ::pause();
  ::kill(pid, SIGSTOP);
  ::waitpid(pid, nullptr, WUNTRACED);
  mine.known = {nullptr, nullptr, std::make_shared<PeerProcess>(pid, "there", "watched")};
  const Error error =
      error_of([&] { host::Rendezvous(store, mine, milliseconds(50)).find_ranks(); });
  expect_error(error, ErrorKind::kTimeout,
               {"ranks 0 and 2 did not join",
                "rank 2 (pid " + std::to_string(pid) + " on there) is stopped"});
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  CHECK(error.info().rank == 2);
}

TEST_CASE("options are compared between hosts, and without shared memory") {
  for (const bool shares_memory : {true, false}) {
    MemoryStore store;
    run_threads(3, [&](int rank) {
      const Error error = error_of([&] {
        find_or_report(
            store, terms(rank, 3, rank < 2 ? "a" : "b", rank < 2 ? "o=1" : "o=2", shares_memory));
      });
      expect_error(error, ErrorKind::kMismatch, {"{o=1}", "{o=2}", "rank 2"});
    });
  }
}

TEST_CASE("options of an earlier group in the same store are waited out, between hosts too") {
  MemoryStore store;
  const auto find = [&](int rank, const std::string& options) {
    find_or_report(store, terms(rank, 2, rank == 0 ? "a" : "b", options));
  };
  run_threads(2, [&](int rank) { find(rank, "o=1"); });
  run_threads(2, [&](int rank) {
    if (rank == 1) std::this_thread::sleep_for(milliseconds(50));
    find(rank, "o=2");
  });
}

TEST_CASE("a group says which transport it has, and several hosts without messages are refused") {
  testing::run_ranks(2, [](Communicator& communicator) {
    expect(communicator.transport_description().find("shm: 1 host: ") == 0,
           communicator.transport_description());
  });
  MemoryStore store;
  run_threads(2, [&](int rank) {
    testing::expect_throws<std::invalid_argument>(
        [&] { Communicator(store, rank, 2, {.host_id = rank == 0 ? "a" : "b"}, testing::kBound); },
        {"2 hosts: "});
  });
}

}  // namespace
