#include "transport/shm/bootstrap.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "core/errors.h"
#include "transport/background_thread.h"
#include "transport/shm/system_error.h"
#include "transport/shm/unix_socket.h"
#include "transport/wait_limits.h"

namespace ringcomm::shm {
namespace {

// The request of a connecting process: a key, or this one, which keeps the connection open.
constexpr const char* kWatchRequest = "watch";
// What a process sends before it exits. Last words are printable, so they are never this.
constexpr const char* kExitNote = "\x04";

constexpr std::chrono::milliseconds kAcceptRetry{10};
constexpr std::chrono::milliseconds kLookInterval{50};
// A peer that sends without end must not block the bootstrap's other work.
constexpr int kMaxTextsAtOnce = 16;

// Null until the first group, and again in a forked child: the thread does not survive a fork.
std::atomic<Bootstrap*> current_bootstrap = nullptr;
std::mutex creation_mutex;

std::string random_name() {
  std::uint64_t random[2] = {};
  if (::getrandom(random, sizeof(random), 0) != sizeof(random)) throw_errno("getrandom");
  char name[64];
  std::snprintf(name, sizeof(name), "ringcomm-%016llx%016llx",
                static_cast<unsigned long long>(random[0]),
                static_cast<unsigned long long>(random[1]));
  return name;
}

UniqueFd open_pidfd(pid_t pid) {
#ifdef SYS_pidfd_open
  if (pid > 0) return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#endif
  return UniqueFd();  // kernels before 5.3: the socket has to do
}

// poll() refuses more entries than RLIMIT_NOFILE, which may be lowered while they are open. Then
// each is looked at by itself.
void poll_each(std::vector<pollfd>& entries, int timeout_ms) {
  if (::poll(entries.data(), entries.size(), timeout_ms) >= 0 || errno == EINTR) return;
  std::this_thread::sleep_for(kLookInterval);
  for (pollfd& entry : entries) ::poll(&entry, 1, 0);
}

// The fields of /proc/PID/stat from the third on, the state; empty if the kernel does not tell.
std::vector<std::string> stat_of(pid_t pid) {
  std::string stat;
  std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), stat);
  // "pid (name) state ...", and the name may hold anything.
  const std::size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream fields(stat.substr(name_end + 1));
  return {std::istream_iterator<std::string>(fields), {}};
}

// The status of a process that its parent has reaped, as wait() gives it; from Linux 6.15 on.
std::optional<int> status_of_reaped(int pidfd) {
  // As in linux/pidfd.h, which may be older than the kernel.
  struct {
    std::uint64_t mask = 1 << 3;  // PIDFD_INFO_EXIT
    std::uint64_t cgroup = 0;
    std::uint32_t ids[11] = {};
    std::int32_t exit_code = 0;
  } info;
  static_assert(sizeof(info) == 64);
  if (pidfd < 0 || ::ioctl(pidfd, _IOWR(0xFF, 11, decltype(info)), &info) != 0) return {};
  if ((info.mask & (1 << 3)) == 0) return {};
  return info.exit_code;
}

// The status of a process that ends, or has ended and is not reaped; none if it runs on.
std::optional<int> status_of_ending(pid_t pid) {
  constexpr std::size_t kFlags = 6, kExitCode = 49;  // behind the state
  constexpr unsigned long kIsExiting = 4;            // PF_EXITING
  const std::vector<std::string> fields = stat_of(pid);
  if (fields.size() <= kExitCode) return {};
  if ((std::strtoul(fields[kFlags].c_str(), nullptr, 10) & kIsExiting) == 0) return {};
  return static_cast<int>(std::strtol(fields[kExitCode].c_str(), nullptr, 10));
}

// Whether a process that has ended did so by itself.
bool has_exited(pid_t pid, int pidfd) {
  // Its parent may reap it between the two questions, but not a second time.
  std::optional<int> status = status_of_ending(pid);
  if (!status) status = status_of_reaped(pidfd);
  return status && WIFEXITED(*status);
}

}  // namespace

bool PeerProcess::is_stopped() const {
  if (is_pid_hidden || pid <= 0 || is_dead.load(std::memory_order_acquire)) return false;
  const std::vector<std::string> fields = stat_of(pid);
  return !fields.empty() && (fields[0] == "T" || fields[0] == "t");
}

std::string PeerProcess::last_words() const {
  const std::lock_guard lock(mutex_);
  return last_words_;
}

void PeerProcess::keep_last_words(std::string words) {
  // The text becomes part of error messages, which must be valid text in Python.
  for (char& letter : words)
    if (letter < ' ' || letter > '~') letter = '?';
  const std::lock_guard lock(mutex_);
  last_words_ = std::move(words);
}

Bootstrap& Bootstrap::instance() {
  if (Bootstrap* bootstrap = current_bootstrap.load(std::memory_order_acquire)) return *bootstrap;
  const std::lock_guard lock(creation_mutex);
  if (Bootstrap* bootstrap = current_bootstrap.load(std::memory_order_acquire)) return *bootstrap;
  static std::once_flag registered;
  std::call_once(registered, [] {
    // Held across the fork, so that the child finds consistent tables and can create its own
    // bootstrap.
    ::pthread_atfork(
        [] {
          creation_mutex.lock();
          if (Bootstrap* bootstrap = current_bootstrap.load()) bootstrap->mutex_.lock();
        },
        [] {
          if (Bootstrap* bootstrap = current_bootstrap.load()) bootstrap->mutex_.unlock();
          creation_mutex.unlock();
        },
        [] {
          if (Bootstrap* bootstrap = current_bootstrap.exchange(nullptr))
            bootstrap->close_all_in_child();
          creation_mutex.unlock();
        });
  });
  auto* bootstrap = new Bootstrap();
  current_bootstrap.store(bootstrap, std::memory_order_release);
  return *bootstrap;
}

Bootstrap::Bootstrap() : address_(random_name()), listener_(listen_at(address_)) {
  wake_event_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_event_) throw_errno("eventfd");
  // Two threads may accept (say_last_words()), and one of them then finds no connection.
  if (::fcntl(listener_.get(), F_SETFL, O_NONBLOCK) != 0) throw_errno("fcntl(O_NONBLOCK)");
  try {
    start_background_thread("ringcomm-boot", [this] { run(); }).detach();
  } catch (const std::system_error& error) {
    throw Error({.kind = ErrorKind::kSystem}, error.what());
  }
}

// Runs in a forked child, where the bootstrap's thread does not exist and the allocator may be
// locked. So it closes descriptors, frees nothing, and leaves the object itself with its mutex
// locked.
void Bootstrap::close_all_in_child() {
  listener_.reset();
  wake_event_.reset();
  for (auto& [key, fd] : offers_) fd.reset();
  for (auto& [address, watch] : watches_) {
    watch.socket.reset();
    watch.pidfd.reset();
  }
  for (UniqueFd& connection : connections_) connection.reset();
}

void Bootstrap::offer(const std::string& key, UniqueFd fd) {
  const std::lock_guard lock(mutex_);
  offers_[key] = std::move(fd);
}

void Bootstrap::withdraw(const std::string& key) {
  const std::lock_guard lock(mutex_);
  offers_.erase(key);
}

UniqueFd Bootstrap::fetch(const std::string& address, const std::string& key,
                          std::chrono::milliseconds timeout, const std::function<void()>& look) {
  const UniqueFd socket = connect_to(address);
  if (!socket) return UniqueFd();
  try {
    send_text(socket.get(), key);
  } catch (const Error&) {
    return UniqueFd();  // it has ended since connect_to()
  }
  if (!look) return recv_fd(socket.get(), timeout);
  const auto deadline = deadline_after(timeout);
  while (!is_readable(socket.get(), kLookInterval)) {
    look();
    if (std::chrono::steady_clock::now() >= deadline) return UniqueFd();
  }
  return recv_fd(socket.get(), std::chrono::milliseconds(0));
}

std::shared_ptr<PeerProcess> Bootstrap::watch(const std::string& address, pid_t pid) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = watches_.find(address); found != watches_.end())
      return found->second.process;
  }
  Watch watch{
      .socket = connect_to(address), .pidfd = {}, .process = std::make_shared<PeerProcess>()};
  if (!watch.socket) return nullptr;
  watch.process->bootstrap_address = address;
  const pid_t seen_pid = credentials_of_peer(watch.socket.get()).pid;
  watch.process->is_pid_hidden = seen_pid == 0;
  watch.process->pid = seen_pid > 0 ? seen_pid : pid;
  send_text(watch.socket.get(), kWatchRequest);
  watch.pidfd = open_pidfd(seen_pid);
  std::shared_ptr<PeerProcess> process;
  {
    const std::lock_guard lock(mutex_);
    // If another thread was faster, its watch is kept.
    process = watches_.try_emplace(address, std::move(watch)).first->second.process;
  }
  wake();
  return process;
}

void Bootstrap::say_last_words(const std::string& text) noexcept {
  Bootstrap* bootstrap = current_bootstrap.load(std::memory_order_acquire);
  if (bootstrap == nullptr) return;
  try {  // also those that the bootstrap's thread has not accepted yet
    while (bootstrap->accept_connection()) {
    }
  } catch (const std::exception&) {
    // The other connections still get the text.
  }
  const std::lock_guard lock(bootstrap->mutex_);
  for (const UniqueFd& connection : bootstrap->connections_) try_send_text(connection.get(), text);
}

void Bootstrap::say_exit() noexcept { say_last_words(kExitNote); }

void Bootstrap::wake() {
  const std::uint64_t one = 1;
  if (::write(wake_event_.get(), &one, sizeof(one)) < 0 && errno != EAGAIN)
    throw_errno("write to an eventfd");
}

void Bootstrap::call_while_idle(Task task) {
  task_.store(task, std::memory_order_release);
  wake();
}

void Bootstrap::run() {
  for (;;) {
    std::vector<pollfd> entries = {{.fd = listener_.get(), .events = POLLIN, .revents = 0},
                                   {.fd = wake_event_.get(), .events = POLLIN, .revents = 0}};
    std::size_t first_connection = 0;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [address, watch] : watches_) {
        if (watch.pidfd)
          entries.push_back({.fd = watch.pidfd.get(), .events = POLLIN, .revents = 0});
        entries.push_back({.fd = watch.socket.get(), .events = POLLIN | POLLRDHUP, .revents = 0});
      }
      first_connection = entries.size();
      for (const UniqueFd& connection : connections_)
        entries.push_back({.fd = connection.get(), .events = POLLIN | POLLRDHUP, .revents = 0});
    }
    const Task task = task_.load(std::memory_order_acquire);
    poll_each(entries, task != nullptr ? static_cast<int>(task().count()) : -1);

    if (entries[1].revents != 0) {
      std::uint64_t count = 0;
      [[maybe_unused]] const ssize_t ignored = ::read(wake_event_.get(), &count, sizeof(count));
    }
    std::map<int, short> events;
    for (const pollfd& entry : entries) events[entry.fd] = entry.revents;
    look_at_watches(events);
    for (std::size_t i = first_connection; i < entries.size(); ++i) {
      if (entries[i].revents == 0 || try_serve(entries[i].fd)) continue;
      const std::lock_guard lock(mutex_);
      std::erase_if(connections_,
                    [&](const UniqueFd& connection) { return connection.get() == entries[i].fd; });
    }
    if (entries[0].revents != 0) try_accept();
  }
}

// Reads what a watched process has sent. Text that it sent before its end can still be read
// afterwards.
void Bootstrap::listen_to(const Watch& watch) {
  try {
    std::string words;
    for (int i = 0; i < kMaxTextsAtOnce; ++i) {
      if (!recv_text(watch.socket.get(), std::chrono::milliseconds(0), words) || words.empty())
        return;
      if (words == kExitNote)
        watch.process->has_exited = true;
      else
        watch.process->keep_last_words(words);
    }
  } catch (const std::exception&) {
    // It may end without sending a text.
  }
}

void Bootstrap::look_at_watches(const std::map<int, short>& events) {
  const std::lock_guard lock(mutex_);
  std::erase_if(watches_, [&](const auto& item) {
    const Watch& watch = item.second;
    const auto event_of = [&](const UniqueFd& fd) {
      const auto found = events.find(fd.get());
      return fd && found != events.end() ? int{found->second} : 0;
    };
    const int heard = event_of(watch.socket);
    const bool has_ended = event_of(watch.pidfd) != 0 || (heard & ~POLLIN) != 0;
    if (heard == 0 && !has_ended) return false;
    listen_to(watch);
    if (!has_ended) return false;
    if (!watch.process->is_pid_hidden && has_exited(watch.process->pid, watch.pidfd.get()))
      watch.process->has_exited = true;
    watch.process->is_dead.store(true, std::memory_order_release);
    return true;
  });
}

// False if no connection is pending.
bool Bootstrap::accept_connection() {
  UniqueFd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!connection) {
    // Probably out of descriptors. Without the pause poll() would return immediately until one is
    // free.
    if (errno != EAGAIN) std::this_thread::sleep_for(kAcceptRetry);
    return false;
  }
  if (!is_trusted_peer(connection.get())) return true;
  const std::lock_guard lock(mutex_);
  connections_.push_back(std::move(connection));
  return true;
}

// The bootstrap's thread has no caller to throw to, so an error on a connection ends that
// connection.

void Bootstrap::try_accept() {
  try {
    accept_connection();
  } catch (const std::exception&) {
    std::this_thread::sleep_for(kAcceptRetry);
  }
}

bool Bootstrap::try_serve(int connection) {
  try {
    return serve(connection);
  } catch (const std::exception&) {
    return false;
  }
}

// Answers one request. False if the connection can be closed.
bool Bootstrap::serve(int connection) {
  std::string key;
  if (!recv_text(connection, std::chrono::milliseconds(0), key) || key.empty()) return false;
  if (key == kWatchRequest) return true;
  const std::lock_guard lock(mutex_);
  const auto found = offers_.find(key);
  if (found == offers_.end()) return false;  // the requester sees the end of the connection
  send_fd(connection, found->second.get());
  return false;
}

}  // namespace ringcomm::shm
