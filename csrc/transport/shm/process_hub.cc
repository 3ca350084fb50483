#include "transport/shm/process_hub.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
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

// What a process asks for when it connects: a key, or this, to have its end of the socket kept
// open.
constexpr const char* kWatchRequest = "watch";

constexpr std::chrono::milliseconds kAcceptRetry{10};
constexpr std::chrono::milliseconds kLookInterval{50};
// A peer that talks without end must not keep the hub from its other work.
constexpr int kMaxTextsAtOnce = 16;

// Null until the first group, and again in a forked child: the thread does not survive a fork.
std::atomic<ProcessHub*> current_hub = nullptr;
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

}  // namespace

bool PeerProcess::is_stopped() const {
  if (pid <= 0 || is_dead.load(std::memory_order_acquire)) return false;
  std::string stat;
  std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), stat);
  // "pid (name) state ...", and the name may hold anything.
  const std::size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= stat.size()) return false;
  return stat[name_end + 2] == 'T' || stat[name_end + 2] == 't';
}

std::string PeerProcess::last_words() const {
  const std::lock_guard lock(mutex_);
  return last_words_;
}

void PeerProcess::keep_last_words(std::string words) {
  // They become a part of error messages, in which Python wants valid text.
  for (char& letter : words)
    if (letter < ' ' || letter > '~') letter = '?';
  const std::lock_guard lock(mutex_);
  last_words_ = std::move(words);
}

ProcessHub& ProcessHub::instance() {
  if (ProcessHub* hub = current_hub.load(std::memory_order_acquire)) return *hub;
  const std::lock_guard lock(creation_mutex);
  if (ProcessHub* hub = current_hub.load(std::memory_order_acquire)) return *hub;
  static std::once_flag registered;
  std::call_once(registered, [] {
    // Held across the fork, so that the child finds the tables whole and can make a hub of its own.
    ::pthread_atfork(
        [] {
          creation_mutex.lock();
          if (ProcessHub* hub = current_hub.load()) hub->mutex_.lock();
        },
        [] {
          if (ProcessHub* hub = current_hub.load()) hub->mutex_.unlock();
          creation_mutex.unlock();
        },
        [] {
          if (ProcessHub* hub = current_hub.exchange(nullptr)) hub->close_all_in_child();
          creation_mutex.unlock();
        });
  });
  auto* hub = new ProcessHub();
  current_hub.store(hub, std::memory_order_release);
  return *hub;
}

ProcessHub::ProcessHub() : address_(random_name()), listener_(listen_at(address_)) {
  wake_event_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_event_) throw_errno("eventfd");
  // Two threads may accept (say_last_words()), of which one finds nothing.
  if (::fcntl(listener_.get(), F_SETFL, O_NONBLOCK) != 0) throw_errno("fcntl(O_NONBLOCK)");
  try {
    start_background_thread("ringcomm-hub", [this] { run(); }).detach();
  } catch (const std::system_error& error) {
    throw Error({.kind = ErrorKind::kSystem}, error.what());
  }
}

// Runs in a forked child, where the hub's thread is gone and the allocator may be locked: closes,
// and frees nothing. The object itself, its mutex locked, is left behind.
void ProcessHub::close_all_in_child() {
  listener_.reset();
  wake_event_.reset();
  for (auto& [key, fd] : offers_) fd.reset();
  for (auto& [address, watch] : watches_) {
    watch.socket.reset();
    watch.pidfd.reset();
  }
  for (UniqueFd& connection : connections_) connection.reset();
}

void ProcessHub::offer(const std::string& key, UniqueFd fd) {
  const std::lock_guard lock(mutex_);
  offers_[key] = std::move(fd);
}

void ProcessHub::withdraw(const std::string& key) {
  const std::lock_guard lock(mutex_);
  offers_.erase(key);
}

UniqueFd ProcessHub::fetch(const std::string& address, const std::string& key,
                           std::chrono::milliseconds timeout, const std::function<void()>& look) {
  const UniqueFd socket = connect_to(address);
  if (!socket) return UniqueFd();
  try {
    send_text(socket.get(), key);
  } catch (const Error&) {
    return UniqueFd();  // it has ended since
  }
  if (!look) return recv_fd(socket.get(), timeout);
  const auto deadline = deadline_after(timeout);
  while (!is_readable(socket.get(), kLookInterval)) {
    look();
    if (std::chrono::steady_clock::now() >= deadline) return UniqueFd();
  }
  return recv_fd(socket.get(), std::chrono::milliseconds(0));
}

std::shared_ptr<PeerProcess> ProcessHub::watch(const std::string& address) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = watches_.find(address); found != watches_.end())
      return found->second.process;
  }
  Watch watch{
      .socket = connect_to(address), .pidfd = {}, .process = std::make_shared<PeerProcess>()};
  if (!watch.socket) return nullptr;
  watch.process->hub_address = address;
  watch.process->pid = credentials_of_peer(watch.socket.get()).pid;
  send_text(watch.socket.get(), kWatchRequest);
  watch.pidfd = open_pidfd(watch.process->pid);
  std::shared_ptr<PeerProcess> process;
  {
    const std::lock_guard lock(mutex_);
    // Another thread may have been faster; its watch is as good.
    process = watches_.try_emplace(address, std::move(watch)).first->second.process;
  }
  wake();
  return process;
}

void ProcessHub::say_last_words(const std::string& text) noexcept {
  ProcessHub* hub = current_hub.load(std::memory_order_acquire);
  if (hub == nullptr) return;
  try {  // also those that the hub's thread has not come to
    while (hub->accept_connection()) {
    }
  } catch (const std::exception&) {
    // The others are told.
  }
  const std::lock_guard lock(hub->mutex_);
  for (const UniqueFd& connection : hub->connections_) try_send_text(connection.get(), text);
}

void ProcessHub::wake() {
  const std::uint64_t one = 1;
  if (::write(wake_event_.get(), &one, sizeof(one)) < 0 && errno != EAGAIN)
    throw_errno("write to an eventfd");
}

void ProcessHub::run() {
  for (;;) {
    std::vector<pollfd> entries = {{.fd = listener_.get(), .events = POLLIN, .revents = 0},
                                   {.fd = wake_event_.get(), .events = POLLIN, .revents = 0}};
    std::size_t first_connection = 0;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [address, watch] : watches_) {
        // poll() passes over the -1 of a pidfd that there is not.
        entries.push_back({.fd = watch.pidfd.get(), .events = POLLIN, .revents = 0});
        entries.push_back({.fd = watch.socket.get(), .events = POLLIN | POLLRDHUP, .revents = 0});
      }
      first_connection = entries.size();
      for (const UniqueFd& connection : connections_)
        entries.push_back({.fd = connection.get(), .events = POLLIN | POLLRDHUP, .revents = 0});
    }
    if (::poll(entries.data(), entries.size(), -1) < 0)
      continue;  // EINTR; nothing else can be done about

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

// Reads what a watched process says: what it said before its end is still there after it.
void ProcessHub::listen_to(const Watch& watch) {
  try {
    std::string words;
    for (int i = 0; i < kMaxTextsAtOnce; ++i) {
      if (!recv_text(watch.socket.get(), std::chrono::milliseconds(0), words) || words.empty())
        return;
      watch.process->keep_last_words(words);
    }
  } catch (const std::exception&) {
    // It may end without a word.
  }
}

void ProcessHub::look_at_watches(const std::map<int, short>& events) {
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
    watch.process->is_dead.store(true, std::memory_order_release);
    return true;
  });
}

// False where there was none to take.
bool ProcessHub::accept_connection() {
  UniqueFd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!connection) {
    // Out of descriptors, most likely; poll() would come back at once for as long as that lasts.
    if (errno != EAGAIN) std::this_thread::sleep_for(kAcceptRetry);
    return false;
  }
  if (!is_trusted_peer(connection.get())) return true;
  const std::lock_guard lock(mutex_);
  connections_.push_back(std::move(connection));
  return true;
}

// The hub's thread has no caller to throw to: an error with a connection ends that connection.

void ProcessHub::try_accept() {
  try {
    accept_connection();
  } catch (const std::exception&) {
    std::this_thread::sleep_for(kAcceptRetry);
  }
}

bool ProcessHub::try_serve(int connection) {
  try {
    return serve(connection);
  } catch (const std::exception&) {
    return false;
  }
}

// Answers one request. False when the connection is done with.
bool ProcessHub::serve(int connection) {
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
