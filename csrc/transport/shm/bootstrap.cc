#include "transport/shm/bootstrap.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "core/errors.h"
#include "transport/process.h"
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

// A connection over which `text` was sent to the bootstrap at `address`; none if that has ended.
UniqueFd request(const std::string& address, const std::string& text) {
  UniqueFd socket = connect_to(address);
  if (!socket) return socket;
  try {
    send_text(socket.get(), text);
  } catch (const Error&) {
    socket.reset();  // since connect_to()
  }
  return socket;
}

// What has happened at a descriptor, as poll() reports it; nothing at an empty one.
short events_of(const UniqueFd& fd) {
  pollfd entry{.fd = fd.get(), .events = POLLIN | POLLRDHUP, .revents = 0};
  return ::poll(&entry, 1, 0) > 0 ? entry.revents : short{0};
}

// The bootstrap's thread has no caller to throw to, so an error on a connection ends that
// connection.
template <class Action>
bool succeeds(const Action& action) noexcept {
  try {
    return action();
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

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
  const UniqueFd socket = request(address, key);
  if (!socket) return UniqueFd();
  const auto deadline = deadline_after(timeout);
  while (!is_readable(socket.get(), std::min(timeout, kLookInterval))) {
    if (look) look();
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
  Watch watch{.socket = request(address, kWatchRequest),
              .pidfd = {},
              .process = std::make_shared<PeerProcess>()};
  if (!watch.socket) return nullptr;
  const pid_t seen_pid = credentials_of_peer(watch.socket.get()).pid;
  watch.process->bootstrap_address = address;
  watch.process->is_pid_hidden = seen_pid == 0;
  watch.process->pid = seen_pid > 0 ? seen_pid : pid;
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
  // Also to those that the bootstrap's thread has not accepted yet.
  while (succeeds([&] { return bootstrap->accept_connection(); })) {
  }
  const std::lock_guard lock(bootstrap->mutex_);
  for (const UniqueFd& connection : bootstrap->connections_) try_send_text(connection.get(), text);
}

void Bootstrap::say_exit() noexcept { say_last_words(kExitNote); }

void Bootstrap::wake() { ::eventfd_write(wake_event_.get(), 1); }

void Bootstrap::call_while_idle(Task task) {
  task_.store(task, std::memory_order_release);
  wake();
}

void Bootstrap::run() {
  for (;;) {
    std::vector<pollfd> entries;
    const auto add = [&](const UniqueFd& fd) {
      if (fd) entries.push_back({.fd = fd.get(), .events = POLLIN | POLLRDHUP, .revents = 0});
    };
    add(listener_);
    add(wake_event_);
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [address, watch] : watches_) {
        add(watch.pidfd);
        add(watch.socket);
      }
      for (const UniqueFd& connection : connections_) add(connection);
    }
    const Task task = task_.load(std::memory_order_acquire);
    const int timeout_ms = task != nullptr ? static_cast<int>(task().count()) : -1;
    // It refuses more entries than RLIMIT_NOFILE, which may be lowered while they are open. Then
    // each is looked at by itself.
    const bool is_refused =
        ::poll(entries.data(), entries.size(), timeout_ms) < 0 && errno != EINTR;
    if (is_refused) std::this_thread::sleep_for(kLookInterval);
    std::set<int> ready;
    for (const pollfd& entry : entries)
      if (is_refused || entry.revents != 0) ready.insert(entry.fd);

    eventfd_t count = 0;
    ::eventfd_read(wake_event_.get(), &count);
    if (ready.contains(listener_.get())) succeeds([this] { return accept_connection(); });
    const std::lock_guard lock(mutex_);
    std::erase_if(watches_, [&](const auto& item) {
      const Watch& watch = item.second;
      const bool is_ready = ready.contains(watch.socket.get()) || ready.contains(watch.pidfd.get());
      return is_ready && !look_at(watch);
    });
    std::erase_if(connections_, [&](const UniqueFd& connection) {
      return ready.contains(connection.get()) && !succeeds([&] { return serve(connection.get()); });
    });
  }
}

// False if the process has ended. Text that it sent before its end can still be read afterwards.
bool Bootstrap::look_at(const Watch& watch) {
  const bool has_ended = events_of(watch.pidfd) != 0 || (events_of(watch.socket) & ~POLLIN) != 0;
  succeeds([&] {
    std::string words;
    for (int i = 0; i < kMaxTextsAtOnce; ++i) {
      if (!recv_text(watch.socket.get(), std::chrono::milliseconds(0), words) || words.empty())
        break;
      if (words == kExitNote)
        watch.process->has_exited = true;
      else
        watch.process->keep_last_words(words);
    }
    return true;
  });
  if (has_ended) watch.process->end(watch.pidfd.get());
  return !has_ended;
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

// Answers one request, with the lock held. False if the connection can be closed.
bool Bootstrap::serve(int connection) {
  std::string key;
  // None at all if poll() was not asked, as where it refused.
  if (!recv_text(connection, std::chrono::milliseconds(0), key)) return true;
  if (key == kWatchRequest) return true;
  // Where there is no such offer, the other end sees the end of the connection.
  if (const auto found = offers_.find(key); found != offers_.end())
    send_fd(connection, found->second.get());
  return false;
}

}  // namespace ringcomm::shm
