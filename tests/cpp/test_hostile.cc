// Another user or a faulty peer can cause an error on a rank, but nothing else. AddressSanitizer
// detects accesses outside buffers.
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "children.h"
#include "collectives/failure.h"
#include "collectives/recorder.h"
#include "core/errors.h"
#include "host/bootstrap.h"
#include "host/fd.h"
#include "host/group.h"
#include "host/rank_record.h"
#include "host/rendezvous.h"
#include "host/shared_arena.h"
#include "host/shared_memory.h"
#include "host/thread_pool.h"
#include "host/threads.h"
#include "host/unix_socket.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::host;
using namespace ringcomm::testing;
using std::chrono::milliseconds;
using testing::error_of;

constexpr uid_t kStranger = 65534;
constexpr milliseconds kPatience{30'000};

std::string fresh_name(const char* what) {
  static int number = 0;
  return "ringcomm-test-" + std::to_string(::getpid()) + "-" + what + std::to_string(number++);
}

// Nothing if it does not come in time.
std::optional<SocketMessage> receive(int socket, milliseconds patience) {
  return is_readable(socket, patience) ? recv_message(socket) : std::nullopt;
}

std::size_t num_open_files() { return testing::num_entries("/proc/self/fd"); }

bool is_root() {
  if (::geteuid() == 0) return true;
  MESSAGE("skipped: needs root, to run a process as another user");
  return false;
}

// Of rank 0 of two, whose bootstrap has that address.
RankRecord record_of_rank_0(const std::string& bootstrap_address) {
  return {.host_id = host_id(),
          .host = host_name(),
          .bootstrap_address = bootstrap_address,
          .pid = ::getpid(),
          .memory_key = "key",
          .options = "o=1",
          .world_size = 2};
}
const GroupTerms kRank1{.rank = 1, .world_size = 2, .options = "o=1"};

// A message of any bytes, with any number of descriptors.
void send_raw(int socket, const std::string& bytes, const std::vector<int>& fds = {}) {
  std::string copy = bytes;
  iovec data{.iov_base = copy.data(), .iov_len = copy.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  if (::sendmsg(socket, &message, MSG_NOSIGNAL) < 0) return;  // it hung up: so it may
}

bool has_descriptor(int socket) {
  const auto message = receive(socket, kPatience);
  return message && message->fd;
}

// The parts of a bootstrap's address, and what a process that knows it sends.
struct Address {
  explicit Address(const std::string& text) {
    std::istringstream(text) >> name >> request_secret >> answer_secret;
  }
  std::string request(const std::string& key) const { return request_secret + " " + key; }

  std::string name, request_secret, answer_secret;
};
const Address& ours() {
  static const Address address(Bootstrap::instance().address());
  return address;
}
UniqueFd connect_to_us() { return connect_to(ours().name); }

// Without a look at who listens there.
[[maybe_unused]] UniqueFd connect_raw(const std::string& name) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address),
            static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size()));
  return socket;
}

// A process that pretends to be a bootstrap: accepts watchers, and answers requests with `answer`.
class FakeBootstrap {
 public:
  explicit FakeBootstrap(std::function<void(int connection)> answer)
      : name_(fresh_name("fake")), listener_(listen_at(name_)), answer_(std::move(answer)) {
    thread_ = std::thread([this] { run(); });
  }
  ~FakeBootstrap() {
    is_over_ = true;
    thread_.join();
  }
  const std::string& address() const { return address_; }
  // As the right one sends it.
  static void send_memory(int connection, int fd) { send_message(connection, "answer \x06", fd); }

 private:
  void run() {
    std::vector<UniqueFd> kept;
    while (!is_over_) {
      if (!is_readable(listener_.get(), milliseconds(10))) continue;
      UniqueFd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      const auto message = receive(connection.get(), milliseconds(1000));
      if (message && message->text != "request watch" && !message->text.empty()) {
        answer_(connection.get());
      } else {
        send_raw(connection.get(), "answer \x03");
        kept.push_back(std::move(connection));
      }
    }
  }

  std::string name_;
  std::string address_ = name_ + " request answer";
  UniqueFd listener_;
  std::function<void(int)> answer_;
  std::atomic<bool> is_over_ = false;
  std::thread thread_;
};

UniqueFd unsealed_memfd(std::size_t num_bytes) {
  UniqueFd fd(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(fd.get(), static_cast<off_t>(num_bytes)) == 0);
  return fd;
}

// ---- strangers

TEST_CASE("hostile: another user at the name of a bootstrap is refused") {
  if (!is_root()) return;
  const std::string name = fresh_name("stolen");
  int ends[2] = {};
  REQUIRE(::pipe(ends) == 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(30);
    if (::setuid(kStranger) != 0) ::_exit(1);
    const UniqueFd listener = listen_at(name);
    [[maybe_unused]] const ssize_t ignored = ::write(ends[1], "x", 1);
    for (;;) ::pause();
  }
  ::close(ends[1]);
  char ready = 0;
  REQUIRE(::read(ends[0], &ready, 1) == 1);
  Bootstrap& bootstrap = Bootstrap::instance();
  const std::vector<std::string> texts = {"runs as user 65534", "run all ranks of a host as one"};
  expect_error(error_of([&] { connect_to(name); }), ErrorKind::kSystem, texts);
  expect_error(error_of([&] { bootstrap.watch(name, 1); }), ErrorKind::kSystem, texts);
  expect_error(error_of([&] { bootstrap.fetch(name, "key", kPatience); }), ErrorKind::kSystem,
               texts);
  expect_error(error_of([&] { PeerMemory(name).find({.region_id = 1}, 1, kPatience); }),
               ErrorKind::kSystem, texts);
  // In a store that survives programs, a record of a program that has ended leads there.
  MemoryStore store;
  RankRecord record = record_of_rank_0(name);
  record.pid = pid;
  store.set("ringcomm/rank/0", record.to_text());
  expect_error(error_of([&] { testing::make_group(store, kRank1, {}, milliseconds(1500)); }),
               ErrorKind::kTimeout, texts);
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  ::close(ends[0]);
}

// Reported of other programs whose sockets have such names:
// https://github.com/golang/vulndb/issues/1306, https://github.com/systemd/systemd/issues/37963
TEST_CASE("hostile: another user gets nothing from a bootstrap") {
  if (!is_root()) return;
  Bootstrap& bootstrap = Bootstrap::instance();
  bootstrap.offer("test/ours", create_memfd(4096));
  const std::string address = bootstrap.address();
  const Address known(address);  // as one that can read the store has it
  CHECK(status_of_child([&] {
          if (::setuid(kStranger) != 0) return 1;
          const UniqueFd socket = connect_to(known.name);
          send_raw(socket.get(), known.request("test/ours"));
          const auto answer = receive(socket.get(), milliseconds(5000));
          if (!answer || answer->fd) return 2;
          return answer->text.find("refused runs as user 65534") == 0 ? 0 : 3;
        }) == 0);
  CHECK(static_cast<bool>(bootstrap.fetch(address, "test/ours", kPatience)));
  bootstrap.withdraw("test/ours");
}

// As another container of the same user: it sees the names of sockets, and has no record.
TEST_CASE("hostile: one of this user that does not know the secret gets nothing") {
  Bootstrap& bootstrap = Bootstrap::instance();
  bootstrap.offer("test/secret", create_memfd(4096));
  std::string almost = ours().request("test/secret");
  almost[ours().request_secret.size() - 1] ^= 1;
  const std::vector<std::string> guesses{"watch",
                                         "test/secret",
                                         " test/secret",
                                         almost,
                                         ours().answer_secret + " test/secret",
                                         ours().request_secret};
  for (const std::string& text : guesses) {
    const UniqueFd socket = connect_to_us();
    send_raw(socket.get(), text);
    const auto answer = receive(socket.get(), kPatience);
    REQUIRE(answer.has_value());
    CHECK(answer->text.empty());
    CHECK_FALSE(static_cast<bool>(answer->fd));
  }
  CHECK(static_cast<bool>(bootstrap.fetch(bootstrap.address(), "test/secret", kPatience)));
  bootstrap.withdraw("test/secret");
}

TEST_CASE("hostile: connections that are held stop nothing, and use up no descriptors") {
  Bootstrap& bootstrap = Bootstrap::instance();
  bootstrap.offer("test/held", create_memfd(4096));
  const std::size_t num_before = num_open_files();
  std::vector<UniqueFd> held;
  for (int i = 0; i < 300; ++i) held.push_back(connect_to_us());
  for (int i = 0; i < 5; ++i)
    CHECK(static_cast<bool>(bootstrap.fetch(bootstrap.address(), "test/held", kPatience)));
  testing::wait_until([&] { return num_open_files() <= num_before + held.size() + 40; },
                      "the other ends closed but for some");
  testing::wait_until([&] { return num_open_files() <= num_before + held.size(); },
                      "all that are silent closed");
  bootstrap.withdraw("test/held");
}

TEST_CASE("hostile: a process that takes the name of one that has ended is not taken for it") {
  Bootstrap& bootstrap = Bootstrap::instance();
  const UniqueFd own = create_memfd(4096);
  const std::string note = "\x06";
  for (const std::string& secret : {std::string("guess!"), std::string(6, ' '), std::string()}) {
    FakeBootstrap liar(
        [&](int connection) { send_message(connection, secret + " " + note, own.get()); });
    CHECK_FALSE(static_cast<bool>(bootstrap.fetch(liar.address(), "key", kPatience)));
  }
  // One that is watched has to prove it.
  const std::string name = fresh_name("silent");
  const UniqueFd silent = listen_at(name);
  for (int i = 0; i < 3; ++i)
    CHECK_FALSE(bootstrap.watch(name + " request answer", 1)->has_answered.load());
  const UniqueFd connection(::accept4(silent.get(), nullptr, nullptr, SOCK_CLOEXEC));
  send_raw(connection.get(), "guess! \x03");
  testing::wait_until(
      [&] {
        const auto message = receive(connection.get(), milliseconds(10));
        return message && message->text.empty();
      },
      "the watch of a stranger to end");
}

TEST_CASE("hostile: who refuses a request says why, and that is all it can say") {
  FakeBootstrap full([](int connection) { send_raw(connection, "refused is out of room"); });
  expect_error(error_of([&] { Bootstrap::instance().fetch(full.address(), "key", kPatience); }),
               ErrorKind::kSystem, {"the process that has the memory", "is out of room"});
}

// Once the group is made, its process may be out of descriptors, and accept nobody to tell so.
TEST_CASE("no rank has found one that has not accepted its connection") {
  const std::string name = fresh_name("silent");
  const UniqueFd silent = listen_at(name);
  MemoryStore store;
  RankRecord record = record_of_rank_0(name + " request answer");
  record.machine_id = machine_id();
  store.set("ringcomm/rank/0", record.to_text());
  Rendezvous rendezvous(store, kRank1, milliseconds(100));
  expect_error(error_of([&] { rendezvous.find_ranks(); }), ErrorKind::kTimeout,
               {"rank 0 did not join the group"});
}

// ---- messages

TEST_CASE("hostile: garbage, oversized and repeated requests leave the bootstrap at work") {
  recorder::start();
  const int num_shared = recorder::descriptor() >= 0 ? 1 : 0;  // a watcher gets the recorder's
  Bootstrap& bootstrap = Bootstrap::instance();
  bootstrap.offer("test/prey", create_memfd(4096));
  CHECK(static_cast<bool>(bootstrap.fetch(bootstrap.address(), "test/prey", kPatience)));
  const std::size_t num_before = num_open_files();
  const UniqueFd own = create_memfd(4096);
  for (const std::size_t num_bytes : {1, 7, 255, 256, 257, 4096, 100'000}) {
    for (const char byte : {'\0', 'w', '\xff'}) {
      const UniqueFd socket = connect_to_us();
      send_raw(socket.get(), std::string(num_bytes, byte));
      CHECK_FALSE(has_descriptor(socket.get()));
    }
  }
  {
    const UniqueFd socket = connect_to_us();  // a watcher that keeps sending
    for (int i = 0; i < 50; ++i) send_raw(socket.get(), ours().request("watch"));
    send_raw(socket.get(), ours().request("test/prey"));
    for (int i = 0; i < 50; ++i) CHECK(has_descriptor(socket.get()) == (num_shared == 1));
    CHECK(has_descriptor(socket.get()));
    CHECK_FALSE(has_descriptor(socket.get()));
  }
  {  // one that never reads does not block the others
    const UniqueFd socket = connect_to_us();
    const std::string request = ours().request("watch");
    for (int i = 0; i < 5000; ++i)
      if (::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
        break;
    CHECK(static_cast<bool>(bootstrap.fetch(bootstrap.address(), "test/prey", kPatience)));
  }
  for (int i = 0; i < 20; ++i) {  // unrequested descriptors
    const UniqueFd socket = connect_to_us();
    send_raw(socket.get(), ours().request("watch"), {own.get(), own.get(), own.get()});
    send_raw(socket.get(), ours().request(std::string("test/prey\0", 10)), {own.get()});
    CHECK(has_descriptor(socket.get()) == (num_shared == 1));
    CHECK_FALSE(has_descriptor(socket.get()));
  }
  CHECK(static_cast<bool>(bootstrap.fetch(bootstrap.address(), "test/prey", kPatience)));
  bootstrap.withdraw("test/prey");
  testing::wait_until([&] { return num_open_files() <= num_before; },
                      "as many descriptors as before");
}

TEST_CASE("hostile: a name that is too long for a socket is an error") {
  const std::vector<std::string> texts = {"200 bytes", "too long"};
  expect_error(error_of([] { connect_to(std::string(200, 'x')); }), ErrorKind::kSystem, texts);
  expect_error(error_of([] { listen_at(std::string(200, 'x')); }), ErrorKind::kSystem, texts);
}

TEST_CASE("hostile: answers without one descriptor are none, and leak none") {
  const UniqueFd own = create_memfd(4096);
  const std::vector<std::vector<int>> sets = {{}, {own.get(), own.get()}};
  for (const std::vector<int>& fds : sets)
    for (const std::size_t num_bytes : {1, 5000}) {
      FakeBootstrap bootstrap([&](int connection) {
        send_raw(connection, "answer \x06" + std::string(num_bytes - 1, 'x'), fds);
      });
      CHECK_FALSE(static_cast<bool>(
          Bootstrap::instance().fetch(bootstrap.address(), "key", milliseconds(5000))));
      const std::size_t num_before = num_open_files();
      for (int i = 0; i < 10; ++i)
        Bootstrap::instance().fetch(bootstrap.address(), "key", milliseconds(5000));
      testing::wait_until([&] { return num_open_files() <= num_before; },
                          "as many descriptors as before");
    }
}

// ---- memory

TEST_CASE("hostile: a group's memory that can be resized, or is short, is not used") {
  const SegmentConfig config;
  const std::size_t num_bytes = SegmentLayout(2, config).num_bytes();
  const UniqueFd unsealed = unsealed_memfd(num_bytes);
  const UniqueFd file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  const UniqueFd small = create_memfd(num_bytes - 4096);
  const UniqueFd none = create_memfd(0);
  const struct {
    int fd;
    ErrorKind kind;
    const char* text;
  } cases[] = {{unsealed.get(), ErrorKind::kSystem, "not sealed"},
               {file.get(), ErrorKind::kSystem, "not sealed"},
               {small.get(), ErrorKind::kMismatch, "does not have the size"},
               {none.get(), ErrorKind::kMismatch, "does not have the size"}};
  for (const auto& c : cases) {
    FakeBootstrap bootstrap([&](int connection) { FakeBootstrap::send_memory(connection, c.fd); });
    MemoryStore store;
    store.set("ringcomm/rank/0", record_of_rank_0(bootstrap.address()).to_text());
    expect_error(error_of([&] { testing::make_group(store, kRank1, config, kPatience); }), c.kind,
                 {c.text});
  }
}

TEST_CASE("hostile: a peer's buffers outside of its memory, or in memory that can shrink") {
  constexpr std::size_t kBytes = 1 << 20;
  const UniqueFd unsealed = unsealed_memfd(kBytes);
  const UniqueFd sealed = create_memfd(kBytes);
  FakeBootstrap shrinking(
      [&](int connection) { FakeBootstrap::send_memory(connection, unsealed.get()); });
  expect_error(
      error_of([&] { PeerMemory(shrinking.address()).find({.region_id = 1}, 1, kPatience); }),
      ErrorKind::kSystem, {"not sealed"});
  FakeBootstrap honest(
      [&](int connection) { FakeBootstrap::send_memory(connection, sealed.get()); });
  PeerMemory memory(honest.address());
  for (const std::uint64_t offset : {std::uint64_t{kBytes}, ~std::uint64_t{0}, std::uint64_t{1}})
    expect_error(
        error_of([&] { memory.find({.region_id = 1, .offset_bytes = offset}, kBytes, kPatience); }),
        ErrorKind::kSystem, {"is not inside"});
  CHECK(memory.find({.region_id = 1, .offset_bytes = 0}, kBytes, kPatience) != nullptr);
}

TEST_CASE(
    "hostile: a reason for an abort that a wild peer has written stays inside of its bounds") {
  MemoryStore store;
  Group group = testing::make_group(store, {.rank = 0, .world_size = 1, .options = "o=1"}, {},
                                    testing::kBound);
  auto* base =
      reinterpret_cast<std::byte*>(&group.doorbell(0)) - offsetof(RankControl, doorbell) - 4096;
  AbortRecord& record = *reinterpret_cast<AbortRecord*>(base);
  REQUIRE(record.state == AbortRecord::kNone);
  std::memset(base, 0xff, sizeof(AbortRecord));
  CHECK(group.state_of(0) == WaitStatus::kNone);  // written by no rank that there is
  record.state = AbortRecord::kWritten;
  CHECK(group.state_of(0) == WaitStatus::kAborted);
  const AbortReason reason = group.abort_reason();
  CHECK(reason.origin == -1);
  CHECK(reason.culprit == -1);
  CHECK(reason.text.size() == sizeof(record.text));
  record.origin = record.culprit = 1'000'000;
  Failure failure(&group, 0, 1);
  const Error error = error_of([&] {
    failure.raise_stopped(WaitStatus::kAborted, 0,
                          Activity{.op = "barrier", .description = "barrier #0"});
  });
  CHECK(error.info().rank == -1);
}

// ---- the system

TEST_CASE("a wait for a message ends in time, however many signals come") {
  struct sigaction action{}, before{};
  action.sa_handler = [](int) {};
  REQUIRE(::sigaction(SIGUSR1, &action, &before) == 0);
  int ends[2] = {};
  REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
  const UniqueFd one(ends[0]), other(ends[1]);
  std::atomic<bool> is_over = false;
  std::thread waiter([&] {
    is_readable(one.get(), milliseconds(200));
    is_over = true;
  });
  for (int i = 0; i < 1000 && !is_over; ++i) {
    ::pthread_kill(waiter.native_handle(), SIGUSR1);
    std::this_thread::sleep_for(milliseconds(10));
  }
  CHECK(is_over.load());
  waiter.join();
  ::sigaction(SIGUSR1, &before, nullptr);
}

#if !defined(__SANITIZE_THREAD__)  // which lets no thread start in a child of a threaded program
TEST_CASE("a command that the library runs is no child of the program's") {
  struct sigaction action{}, before{};
  static std::atomic<int> num_signals = 0;
  action.sa_handler = [](int) { ++num_signals; };
  REQUIRE(::sigaction(SIGCHLD, &action, &before) == 0);
  const std::string path = "/tmp/ringcomm-test-shell-" + std::to_string(::getpid());
  start_background_thread("shell", [&] { recorder::run_shell("echo $PPID >" + path); }).join();
  ::sigaction(SIGCHLD, &before, nullptr);
  pid_t parent = 0;
  std::ifstream(path) >> parent;
  ::unlink(path.c_str());
  CHECK(parent > 0);
  CHECK(parent != ::getpid());
  CHECK(num_signals == 0);
  CHECK(::waitpid(-1, nullptr, WNOHANG) == -1);
}

TEST_CASE("a bootstrap whose thread cannot start is an error that says so") {
  if (!is_root()) return;
  const int status = status_of_child([] {
    const rlimit none{.rlim_cur = 0, .rlim_max = 100};
    const rlimit some{.rlim_cur = 100, .rlim_max = 100};
    if (::setuid(kStranger) != 0 || ::setrlimit(RLIMIT_NPROC, &none) != 0) return 1;
    const Error error = error_of([] { Bootstrap::instance(); });
    expect_error(error, ErrorKind::kSystem, {"ringcomm-boot", "could not be started", "ulimit -u"});
    if (::setrlimit(RLIMIT_NPROC, &some) != 0) return 2;
    Bootstrap& bootstrap = Bootstrap::instance();
    bootstrap.offer("key", create_memfd(4096));
    return bootstrap.fetch(bootstrap.address(), "key", kPatience) ? 0 : 3;
  });
  CHECK(status == 0);
}

TEST_CASE("hostile: last words are not for one that does not know the secret") {
  const int status = status_of_child([] {
    const UniqueFd silent = connect_to(Address(Bootstrap::instance().address()).name);
    for (int i = 0; i < 3; ++i) Bootstrap::report_exit("not for a stranger");
    return receive(silent.get(), milliseconds(50)) ? 1 : 0;
  });
  CHECK(status == 0);
}

// Reported at https://github.com/pytorch/pytorch/issues/973 for descriptors that are passed on.
TEST_CASE("a bootstrap that is out of descriptors says so at once") {
  const int status = status_of_child([] {
    Bootstrap& bootstrap = Bootstrap::instance();
    bootstrap.offer("key", create_memfd(4096));
    const auto process = bootstrap.watch(bootstrap.address(), ::getpid());
    for (Backoff backoff; !process->has_answered; backoff.sleep()) continue;
    const rlimit few{.rlim_cur = 100, .rlim_max = 100};
    if (::setrlimit(RLIMIT_NOFILE, &few) != 0) return 1;
    std::vector<UniqueFd> files;
    while (UniqueFd file{::open("/dev/null", O_RDONLY | O_CLOEXEC)})
      files.push_back(std::move(file));
    files.pop_back();  // for this end of the connection
    for (int i = 0; i < 3; ++i)
      expect_error(error_of([&] { bootstrap.fetch(bootstrap.address(), "key", kPatience); }),
                   ErrorKind::kSystem, {"accept4 failed", "errno 24", "100 (ulimit -n)"});
    files.clear();
    for (Backoff backoff; !process->refusal().empty(); backoff.sleep()) continue;
    return bootstrap.fetch(bootstrap.address(), "key", kPatience) ? 0 : 2;
  });
  CHECK(status == 0);
}

// In a user namespace without a map, as of a container without root, all users look like 65534:
// https://github.com/DeusData/codebase-memory-mcp/issues/2103
TEST_CASE("hostile: a user that the container does not know is not taken for its own") {
  if (!is_root()) return;
  int to_parent[2] = {}, to_child[2] = {};
  REQUIRE(::pipe(to_parent) == 0);
  REQUIRE(::pipe(to_child) == 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(60);
    std::string report = "cannot make a user namespace";
    if (::setuid(1001) == 0 && ::unshare(CLONE_NEWUSER) == 0) {
      Bootstrap& bootstrap = Bootstrap::instance();
      bootstrap.offer("key", create_memfd(4096));
      const bool is_own = static_cast<bool>(bootstrap.fetch(bootstrap.address(), "key", kPatience));
      report = is_own ? bootstrap.address() : "its own user is refused";
    }
    [[maybe_unused]] ssize_t ignored = ::write(to_parent[1], report.data(), report.size());
    ignored = ::read(to_child[0], report.data(), 1);
    ::_exit(0);
  }
  std::string report(200, '\0');
  report.resize(static_cast<std::size_t>(
      std::max<ssize_t>(::read(to_parent[0], report.data(), report.size()), 0)));
  if (report.find("cannot") == 0) {
    MESSAGE("skipped: " << report);
  } else {
    const Address address(report);
    REQUIRE_MESSAGE(address.name.find("ringcomm-") == 0, report);
    const int status = status_of_child([&] {
      if (::setuid(1002) != 0) return 1;
      const UniqueFd socket = connect_raw(address.name);
      send_raw(socket.get(), address.request("key"));
      const auto answer = receive(socket.get(), kPatience);
      if (!answer || answer->fd) return 2;
      return answer->text.find("a user that this container does not know") != std::string::npos ? 0
                                                                                                : 3;
    });
    CHECK(status == 0);
  }
  CHECK(::write(to_child[1], "x", 1) == 1);
  ::waitpid(pid, nullptr, 0);
  for (const int fd : {to_parent[0], to_parent[1], to_child[0], to_child[1]}) ::close(fd);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // they have a getsockopt, too
std::atomic<int> num_receives = 0;

TEST_CASE("a bootstrap asks the system about the processes with news, and not about all") {
  constexpr int kNumQuiet = 32, kNumNews = 20;
  std::vector<std::unique_ptr<FakeBootstrap>> quiet;
  Bootstrap& bootstrap = Bootstrap::instance();
  bootstrap.offer("test/news", create_memfd(4096));
  for (int i = 0; i < kNumQuiet; ++i) {
    quiet.push_back(std::make_unique<FakeBootstrap>([](int) {}));
    const auto process = bootstrap.watch(quiet.back()->address(), ::getpid());
    testing::wait_until([&] { return process->has_answered.load(); }, "the answer");
  }
  num_receives = 0;
  for (int i = 0; i < kNumNews; ++i)
    CHECK(static_cast<bool>(bootstrap.fetch(bootstrap.address(), "test/news", kPatience)));
  CHECK(num_receives < kNumNews * kNumQuiet / 2);
  bootstrap.withdraw("test/news");
}

std::atomic<int> num_failures = 0;
std::atomic<pid_t> spared_thread = 0;

TEST_CASE("an error in accepting a connection ends that connection, and not the process") {
  const int status = status_of_child([] {
    Bootstrap& bootstrap = Bootstrap::instance();
    bootstrap.offer("key", create_memfd(4096));
    spared_thread = ::gettid();
    num_failures = 1;  // of the bootstrap's thread, which looks at the peer's user
    // The connection is made again.
    return bootstrap.fetch(bootstrap.address(), "key", kPatience) && num_failures == 0 ? 0 : 1;
  });
  CHECK(status == 0);
}

std::atomic<int> accept_error = 0;

// As in a sandbox that a program enters once its group is made.
TEST_CASE("a bootstrap that may accept no more tells those that watch it, until it may again") {
  const int status = status_of_child([] {
    Bootstrap& bootstrap = Bootstrap::instance();
    bootstrap.offer("key", create_memfd(4096));
    const auto process = bootstrap.watch(bootstrap.address(), ::getpid());
    if (!bootstrap.fetch(bootstrap.address(), "key", kPatience)) return 1;
    for (const int error : {EPERM, ECONNABORTED, EMFILE}) {
      accept_error = error;
      for (int i = 0; i < 2; ++i)
        expect_error(error_of([&] { bootstrap.fetch(bootstrap.address(), "key", kPatience); }),
                     ErrorKind::kSystem, {"accepts no connections", std::strerror(error)});
      if (bootstrap.refusal().empty() || process->is_dead) return 2;
      accept_error = 0;
      for (Backoff backoff; !process->refusal().empty(); backoff.sleep()) continue;
      if (!bootstrap.fetch(bootstrap.address(), "key", kPatience)) return 3;
      if (!bootstrap.refusal().empty()) return 4;
    }
    return 0;
  });
  CHECK(status == 0);
}

enum class Kernel { kThis, kBefore6_3, kStrict };
std::atomic<Kernel> kernel = Kernel::kThis;

TEST_CASE("memory is created on kernels that require MFD_NOEXEC_SEAL, and on older ones") {
  for (const Kernel other : {Kernel::kStrict, Kernel::kBefore6_3}) {
    kernel = other;
    CHECK_NOTHROW(create_memfd(4096));
  }
  kernel = Kernel::kThis;
}
#endif

TEST_CASE("a child that was forked while another thread made a group can make one" *
          doctest::skip(ringcomm::testing::kHasAddressSanitizer)) {
  std::atomic<bool> is_over = false;
  std::thread busy([&] {
    while (!is_over) CoreShare(0.5);
  });
  for (int i = 0; i < 20; ++i)
    CHECK(status_of_child([&] {
            ::alarm(5);
            const CoreShare share(0.5);
            return 0;
          }) == 0);
  is_over = true;
  busy.join();
}
#endif

}  // namespace

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
// In libc's place: fails `num_failures` times, on other threads than `spared_thread`.
extern "C" int getsockopt(int fd, int level, int name, void* value, socklen_t* num_bytes) noexcept {
  if (num_failures > 0 && ::gettid() != spared_thread) {
    --num_failures;
    errno = EIO;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_getsockopt, fd, level, name, value, num_bytes));
}

extern "C" ssize_t recvmsg(int fd, msghdr* message, int flags) {
  ++num_receives;
  return ::syscall(SYS_recvmsg, fd, message, flags);
}

// Fails with `accept_error` while it is not 0.
extern "C" int accept4(int fd, sockaddr* address, socklen_t* num_bytes, int flags) {
  if (accept_error == 0)
    return static_cast<int>(::syscall(SYS_accept4, fd, address, num_bytes, flags));
  errno = accept_error;
  return -1;
}

// Behaves like the kernel `kernel`. kStrict is Linux 6.3 to 6.5 with vm.memfd_noexec=2.
extern "C" int memfd_create(const char* name, unsigned flags) noexcept {
  constexpr unsigned kNoExecSeal = 8, kExec = 16;
  if (kernel == Kernel::kBefore6_3 && (flags & (kNoExecSeal | kExec)) != 0) {
    errno = EINVAL;
    return -1;
  }
  if (kernel == Kernel::kStrict && (flags & kNoExecSeal) == 0) {
    errno = EACCES;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_memfd_create, name, flags));
}
#endif
