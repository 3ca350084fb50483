// How ranks find each other: their hosts, and the transport that a group chooses; and the bootstrap
// between two processes: memory handles and the detection of deaths. The other process is this
// program again, started with the test case "child: ..." that runs its part.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "children.h"
#include "core/errors.h"
#include "host/bootstrap.h"
#include "host/fd.h"
#include "host/rank_record.h"
#include "host/rendezvous.h"
#include "host/shared_memory.h"
#include "host/unix_socket.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::host;
using namespace ringcomm::testing;
using std::chrono::milliseconds;
using testing::error_of;

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

constexpr milliseconds kSecond{1000};
constexpr const char* kChildFd = "RINGCOMM_TEST_CHILD_FD";
constexpr const char* kChildKey = "memory of the child";

std::string read_line(int fd) {
  std::string line;
  for (char c = 0; ::read(fd, &c, 1) == 1 && c != '\n';) line += c;
  return line;
}

void write_line(int fd, const std::string& line) {
  const std::string text = line + "\n";
  CHECK(::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
}

// The child's part: makes a bootstrap, offers memory, reports its address, and waits to be killed.
// At SIGUSR1 it makes a copy of itself, which keeps its sockets, and reports that one's pid.
TEST_CASE("child: offers memory until it is killed" * doctest::skip()) {
  const char* fd_text = std::getenv(kChildFd);
  if (fd_text == nullptr) return;
  ::signal(SIGUSR1, [](int) {
    const long pid = ::syscall(SYS_clone, 0, 0, 0, 0, 0);  // without what fork() calls
    if (pid != 0) return write_line(std::atoi(std::getenv(kChildFd)), std::to_string(pid));
    ::alarm(120);
    for (;;) ::pause();
  });
  UniqueFd memory = create_memfd(4096);
  SharedMemory(memory.get(), 4096).data()[0] = std::byte{77};
  Bootstrap& bootstrap = Bootstrap::instance();
  bootstrap.offer(kChildKey, std::move(memory));
  write_line(std::atoi(fd_text), bootstrap.address());
  ::alarm(120);  // should the parent die
  for (;;) ::pause();
}

// A process with its own bootstrap; the destructor kills it.
class Child {
 public:
  Child() {
    int ends[2] = {};
    if (::pipe(ends) != 0) throw std::runtime_error("pipe");
    read_end_.reset(ends[0]);
    const std::string fd_text = std::to_string(ends[1]);
    pid_ = ::fork();
    if (pid_ == 0) {  // only calls that a child of a program with threads may make
      ::setenv(kChildFd, fd_text.c_str(), 1);
      testing::become_case("--test-case=child: offers*");
    }
    ::close(ends[1]);
    if (pid_ < 0) throw std::runtime_error("fork");
    address_ = read_line(read_end_.get());
  }
  ~Child() { kill_and_reap(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  const std::string& address() const { return address_; }
  void kill() const {
    if (pid_ > 0) ::kill(pid_, SIGKILL);  // kill(-1) would be for every process there is
  }
  pid_t make_copy() const {
    ::kill(pid_, SIGUSR1);
    return std::stoi(read_line(read_end_.get()));
  }
  void kill_and_reap() {
    if (pid_ <= 0) return;
    kill();
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  UniqueFd read_end_;
  std::string address_;
};

TEST_CASE("an offer is fetched until it is withdrawn, and then known to be missing at once") {
  Bootstrap& bootstrap = Bootstrap::instance();
  UniqueFd memory = create_memfd(4096);
  const int number = memory.get();
  bootstrap.offer("test/twice", std::move(memory));
  for (int i = 0; i < 2; ++i) {
    const UniqueFd fd = bootstrap.fetch(bootstrap.address(), "test/twice", 30 * kSecond);
    CHECK(SharedMemory::of_peer(fd.get()).num_bytes() == 4096);
  }
  for (int i = 0; i < 2; ++i) bootstrap.withdraw("test/twice");
  const auto begin = std::chrono::steady_clock::now();
  for (const char* key : {"test/twice", "test/never made"})
    CHECK_FALSE(static_cast<bool>(bootstrap.fetch(bootstrap.address(), key, 30 * kSecond)));
  CHECK(std::chrono::steady_clock::now() - begin < 20 * kSecond);
  CHECK_FALSE(static_cast<bool>(bootstrap.fetch("ringcomm-nobody", "key", kSecond)));
  // Closed: the number is free, or some other file's.
  CHECK((::fcntl(number, F_GETFD) < 0 || ::fcntl(number, F_GET_SEALS) < 0));
}

TEST_CASE("memory of another process is fetched, and outlives it") {
  Child child;
  REQUIRE_FALSE(child.address().empty());
  const UniqueFd fd =
      Bootstrap::instance().fetch(child.address(), kChildKey, std::chrono::seconds(30));
  child.kill_and_reap();
  CHECK(SharedMemory(fd.get(), 4096).data()[0] == std::byte{77});
}

TEST_CASE("the death of a watched process is detected before it is reaped") {
  Bootstrap& bootstrap = Bootstrap::instance();
  Child child, other;
  const std::shared_ptr<PeerProcess> process = bootstrap.watch(child.address(), child.pid());
  CHECK(bootstrap.watch(child.address(), child.pid()) == process);  // one watch for all groups
  const std::shared_ptr<PeerProcess> other_process = bootstrap.watch(other.address(), 1);
  CHECK(process->pid == child.pid());
  CHECK(other_process->pid == other.pid());
  std::this_thread::sleep_for(milliseconds(20));
  CHECK_FALSE(process->is_dead.load());

  child.kill();
  testing::wait_until([&] { return process->is_dead.load(); }, "the death");
  CHECK_FALSE(other_process->is_dead.load());
  CHECK_FALSE(bootstrap.watch(bootstrap.address(), ::getpid())->is_dead.load());
  child.kill_and_reap();
  CHECK(bootstrap.watch(child.address(), child.pid()) == nullptr);
}

TEST_CASE("a death is seen while a copy of the process keeps its sockets") {
  Child child;
  const auto process = Bootstrap::instance().watch(child.address(), child.pid());
  const pid_t copy = child.make_copy();
  REQUIRE(copy > 0);
  child.kill();
  testing::wait_until([&] { return process->is_dead.load(); }, "the death");
  CHECK(::kill(copy, SIGKILL) == 0);  // it was there until now
}

// poll() then refuses all at once. The first death ends the call of poll() that began before.
TEST_CASE("a death is seen with more descriptors than a lowered limit allows") {
  Bootstrap& bootstrap = Bootstrap::instance();
  Child child, other;
  const std::shared_ptr<PeerProcess> process = bootstrap.watch(child.address(), child.pid());
  const std::shared_ptr<PeerProcess> other_process = bootstrap.watch(other.address(), other.pid());
  rlimit limit{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  const rlimit lowered{.rlim_cur = 3, .rlim_max = limit.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &lowered) == 0);
  for (const auto& [dying, watched] :
       {std::pair{&child, process}, std::pair{&other, other_process}}) {
    dying->kill();
    testing::wait_until([&, watched = watched] { return watched->is_dead.load(); }, "the death");
  }
  CHECK(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

// Here the process is its own peer, as ranks that are threads are.
TEST_CASE("what a process says before it ends is kept, and stays printable") {
  Bootstrap& bootstrap = Bootstrap::instance();
  const std::shared_ptr<PeerProcess> process = bootstrap.watch(bootstrap.address(), ::getpid());
  CHECK(process->exit_reason().empty());
  const auto says = [&](const std::string& words, const std::string& heard) {
    testing::wait_until(
        [&] {
          Bootstrap::report_exit(words);  // again: the connection may not be accepted yet
          return process->exit_reason() == heard;
        },
        "the words");
  };
  says("ValueError: no row 7", "ValueError: no row 7");
  says("one\ntwo \xff", "one?two ?");
  says(std::string(1000, 'x'), std::string(256, 'x'));
  CHECK_FALSE(process->is_dead.load());
  // Later cases use the same process and expect no reason. Texts arrive in order, so nothing is
  // in flight after this one.
  Bootstrap::report_exit("end");
  testing::wait_until([&] { return process->exit_reason() == "end"; }, "the end");
  process->exit_reason.keep({});
}

#if !defined(__SANITIZE_THREAD__)  // which lets no thread start in a child of a threaded program
TEST_CASE("a forked child has a bootstrap of its own and none of the parent's descriptors") {
  Bootstrap& bootstrap = Bootstrap::instance();
  UniqueFd memory = create_memfd(4096);
  const int number = memory.get();
  bootstrap.offer("test/kept from children", std::move(memory));
  int ends[2] = {};
  REQUIRE(::pipe(ends) == 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    const bool has_lost_memory = ::fcntl(number, F_GETFD) < 0;
    write_line(ends[1], (has_lost_memory ? "lost " : "kept ") + Bootstrap::instance().address());
    ::_exit(0);
  }
  const std::string report = read_line(ends[0]);
  ::waitpid(pid, nullptr, 0);
  ::close(ends[0]);
  ::close(ends[1]);
  CHECK(report.substr(0, 5) == "lost ");
  CHECK(report.substr(5, 9) == "ringcomm-");
  CHECK(report.substr(5) != bootstrap.address());
  CHECK(
      static_cast<bool>(bootstrap.fetch(bootstrap.address(), "test/kept from children", kSecond)));
}
#endif

}  // namespace
