#include "transport/shm/bootstrap.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "core/annotations.h"
#include "core/errors.h"
#include "transport/process.h"

namespace ringcomm::shm {
namespace {

// The request of a connecting process: a key, or this one, which keeps the connection open.
constexpr const char* kWatchRequest = "watch";
// What a process sends before it exits. Last words are printable, so they are never this.
constexpr const char* kExitNote = "\x04";

// Comes with the descriptor that a watcher gets.
constexpr const char* kSharedNote = "\x05";

constexpr std::chrono::milliseconds kNow{0};
constexpr int kLookMs = 2000;
constexpr std::chrono::milliseconds kAcceptRetry{10};
// A peer that sends without end must not block the bootstrap's other work.
constexpr int kMaxTextsAtOnce = 16;

std::mutex current_mutex;
Bootstrap* current = nullptr;  // again in a forked child, which has no such thread

std::string random_name() {
  std::uint64_t random[2] = {};
  if (::getrandom(random, sizeof(random), 0) != sizeof(random)) throw_errno("getrandom");
  return "ringcomm-" + std::to_string(random[0]) + "-" + std::to_string(random[1]);
}

// None on kernels before 5.3, and of a hidden process: there the socket has to do.
UniqueFd open_pidfd(pid_t pid) {
  return pid > 0 ? UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) : UniqueFd();
}

// Whether the action threw no error: the bootstrap's thread has no caller to throw to.
template <class Action>
bool succeeds(const Action& action) noexcept {
  try {
    action();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// A connection over which `text` was sent to the bootstrap at `address`; none if that has ended.
UniqueFd request(const std::string& address, const std::string& text) {
  UniqueFd socket = connect_to(address);
  RINGCOMM_STEP("before a request");
  if (socket && !succeeds([&] { send_message(socket.get(), text); })) socket.reset();
  return socket;
}

pollfd entry_of(const UniqueFd& fd) {
  return {.fd = fd.get(), .events = POLLIN | POLLRDHUP, .revents = 0};
}

// What has happened at a descriptor, as poll() reports it; nothing at an empty one.
short events_of(const UniqueFd& fd) {
  pollfd entry = entry_of(fd);
  return ::poll(&entry, 1, 0) > 0 ? entry.revents : short{0};
}

// Whether the process has ended. Text that it sent before can still be read afterwards.
bool has_ended(const UniqueFd& socket, const UniqueFd& pidfd, PeerProcess& process) {
  const bool is_over = events_of(pidfd) != 0 || (events_of(socket) & ~POLLIN) != 0;
  succeeds([&] {
    for (int i = 0; i < kMaxTextsAtOnce; ++i) {
      const auto message = recv_message(socket.get(), kNow);
      if (!message || message->text.empty()) break;
      if (message->text == kSharedNote)
        process.keep_flight(message->fd.get());
      else if (message->text == kExitNote)
        process.has_exited = true;
      else
        process.keep_last_words(message->text);
    }
  });
  if (is_over) process.end(pidfd.get());
  return is_over;
}

}  // namespace

Bootstrap& Bootstrap::instance() {
  const std::lock_guard lock(current_mutex);
  // Both locks are held across a fork, so that the child finds consistent tables.
  [[maybe_unused]] static const int registered = ::pthread_atfork(
      [] {
        current_mutex.lock();
        if (current != nullptr) current->mutex_.lock();
      },
      [] {
        if (current != nullptr) current->mutex_.unlock();
        current_mutex.unlock();
      },
      [] {
        if (Bootstrap* parents = std::exchange(current, nullptr)) parents->close_all_in_child();
        current_mutex.unlock();
      });
  if (current == nullptr) current = new Bootstrap();
  return *current;
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

// In a forked child the allocator may be locked: this frees nothing, and leaves the mutex locked.
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
    if (RunningClock::now() >= deadline) return UniqueFd();
  }
  RINGCOMM_STEP("before memory is received");
  return std::move(recv_message(socket.get(), kNow)->fd);
}

std::shared_ptr<PeerProcess> Bootstrap::watch(const std::string& address, pid_t pid,
                                              const std::string& host) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = watches_.find(address); found != watches_.end())
      return found->second.process;
  }
  UniqueFd socket = request(address, kWatchRequest);
  if (!socket) return nullptr;
  const pid_t seen_pid = credentials_of_peer(socket.get()).pid;
  Watch watch{std::move(socket), open_pidfd(seen_pid),
              std::make_shared<PeerProcess>(seen_pid > 0 ? seen_pid : pid, host, address)};
  watch.process->is_pid_hidden = seen_pid == 0;
  const std::lock_guard lock(mutex_);
  ::eventfd_write(wake_event_.get(), 1);  // the thread watches it, too
  // If another thread was faster, its watch is kept.
  return watches_.try_emplace(address, std::move(watch)).first->second.process;
}

void Bootstrap::share_with_watchers(int fd, std::function<void()> look) {
  const std::lock_guard lock(mutex_);
  shared_fd_ = fd;
  look_ = std::move(look);
  ::eventfd_write(wake_event_.get(), 1);
}

void Bootstrap::say_last_words(const std::string& text) noexcept {
  const std::lock_guard current_lock(current_mutex);
  if (current == nullptr) return;
  current->accept_all();  // its thread may not have
  const std::lock_guard lock(current->mutex_);
  for (const UniqueFd& connection : current->connections_)
    std::ignore = ::send(connection.get(), text.data(), std::min(text.size(), kMaxTextBytes),
                         MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Bootstrap::say_exit() noexcept { say_last_words(kExitNote); }

void Bootstrap::run() {
  for (;;) {
    std::vector<pollfd> entries{entry_of(listener_), entry_of(wake_event_)};
    std::function<void()> look;
    {
      const std::lock_guard lock(mutex_);
      look = look_;
      for (const auto& [address, watch] : watches_)
        entries.insert(entries.end(), {entry_of(watch.pidfd), entry_of(watch.socket)});
      for (const UniqueFd& connection : connections_) entries.push_back(entry_of(connection));
    }
    // It refuses more entries than a lowered RLIMIT_NOFILE. Each is looked at by itself below.
    if (::poll(entries.data(), entries.size(), look ? kLookMs : -1) < 0 && errno != EINTR)
      std::this_thread::sleep_for(kLookInterval);
    if (look) succeeds(look);
    eventfd_t count = 0;
    ::eventfd_read(wake_event_.get(), &count);
    accept_all();
    const std::lock_guard lock(mutex_);
    std::erase_if(watches_, [](const auto& item) {
      const auto& [socket, pidfd, process] = item.second;
      return has_ended(socket, pidfd, *process);
    });
    std::erase_if(connections_, [this](const UniqueFd& connection) {
      bool is_kept = false;
      succeeds([&] { is_kept = serve(connection.get()); });
      return !is_kept;
    });
  }
}

void Bootstrap::accept_all() noexcept {
  while (UniqueFd connection{
      ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)}) {
    succeeds([&] {
      if (!is_trusted_peer(connection.get())) return;
      const std::lock_guard lock(mutex_);
      connections_.push_back(std::move(connection));
    });
  }
  // Probably out of descriptors: poll() would return immediately until one is free.
  if (errno != EAGAIN) std::this_thread::sleep_for(kAcceptRetry);
}

// Answers one request if there is one, with the lock held. False if the connection can be closed.
bool Bootstrap::serve(int connection) {
  const auto message = recv_message(connection, kNow);
  if (!message) return true;
  if (message->text == kWatchRequest) {
    if (shared_fd_ >= 0) send_message(connection, kSharedNote, shared_fd_);
    return true;
  }
  // Where there is no such offer, the other end sees the end of the connection.
  if (const auto found = offers_.find(message->text); found != offers_.end()) {
    RINGCOMM_STEP("before memory is sent");
    send_message(connection, "memory", found->second.get());
  }
  return false;
}

}  // namespace ringcomm::shm
