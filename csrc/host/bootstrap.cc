#include "host/bootstrap.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "core/annotations.h"
#include "host/threads.h"
#include "host/unix_socket.h"
#include "host/wait.h"

namespace ringcomm::host {
namespace {

// The request of a connecting process: a key, or this one, which keeps the connection open.
constexpr const char* kWatchRequest = "watch";
// What a process answers, with a descriptor if it has one to share: that it is there, and memory.
constexpr const char* kWatchedMessage = "\x03";
constexpr const char* kMemoryMessage = "\x06";
// What a process sends before it exits without a reason. Reasons are printable, so never this.
constexpr const char* kExitMessage = "\x04";
// Why a process accepts no connections follows; nothing where it does again.
constexpr const char* kRefusalMessage = "\x08";
// The reason follows, in a message without a secret.
constexpr std::string_view kRefusal = "refused ";
constexpr std::size_t kMaxReasonBytes = 256;

constexpr int kLookMs = 2000;
constexpr std::chrono::milliseconds kRetryPause{10};
// What fails so often in a row does not pass by itself.
constexpr int kMaxAcceptRetries = 20;
// A peer that sends or connects without end must not block the bootstrap's other work.
constexpr int kMaxTextsAtOnce = 16, kMaxAcceptsAtOnce = 64;
// Connections that have not shown the secret: how many may stay, and how long.
constexpr std::ptrdiff_t kMaxUnproven = 32;
constexpr std::chrono::seconds kMaxSilence{5};
// A connection that was closed unread is made again so often.
constexpr int kMaxRequests = 5;

std::mutex current_mutex;
Bootstrap* current = nullptr;  // again in a forked child, which has no such thread

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

// An address, as Bootstrap::address() has it.
struct Address {
  explicit Address(const std::string& text) {
    std::istringstream(text) >> name >> request_secret >> answer_secret;
  }
  std::string name, request_secret, answer_secret;
};

// What follows the secret in a message; nothing if it begins with another. The time that this takes
// does not tell how much of a guess is right.
std::optional<std::string> after_secret(const std::string& secret, const std::string& message) {
  if (message.size() <= secret.size()) return std::nullopt;
  unsigned difference = secret.empty() ? 1U : 0U;
  for (std::size_t i = 0; i < secret.size(); ++i)
    difference |= static_cast<unsigned char>(secret[i]) ^ static_cast<unsigned char>(message[i]);
  if (difference != 0) return std::nullopt;
  return message.substr(secret.size() + 1);
}

// Why the other end closes the connection; nothing if it does not say so.
std::optional<std::string> refusal_in(const std::string& message) {
  if (!message.starts_with(kRefusal)) return std::nullopt;
  return message.substr(kRefusal.size());
}

void refuse(int socket, const std::string& why) noexcept {
  succeeds([&] { try_send(socket, std::string(kRefusal) + why); });
}

// A connection to the bootstrap at `address`, over which `text` was sent; none like connect_to().
UniqueFd request(const Address& address, const std::string& text) {
  UniqueFd socket = connect_to(address.name);
  RINGCOMM_STEP("before a request");
  if (!socket) return socket;
  const int code = try_send(socket.get(), address.request_secret + " " + text);
  if (code == 0) return socket;
  if (code != EPIPE && code != ECONNRESET && code != EAGAIN)
    throw Error({.kind = ErrorKind::kSystem}, describe_errno("send on a Unix socket", code));
  errno = EAGAIN;  // closed by the other end, which may have too many
  return UniqueFd();
}

UniqueFd accept_at(const UniqueFd& listener) {
  errno = EBADF;
  if (!listener.has_its_file()) return UniqueFd();
  return UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

// What has happened at a descriptor; nothing at one that has become another file's.
short events_at(const UniqueFd& fd, const std::map<int, short>& events) {
  const auto found = events.find(fd.get());
  return found != events.end() && fd.has_its_file() ? found->second : short{0};
}

// What poll() finds within `timeout_ms`. It refuses more entries than a lowered RLIMIT_NOFILE, and
// in a sandbox any: then each is asked alone, or its socket is read.
std::map<int, short> wait_for_events(std::vector<pollfd> entries, int timeout_ms) {
  if (::poll(entries.data(), entries.size(), timeout_ms) < 0 && errno != EINTR) {
    std::this_thread::sleep_for(kCheckInterval);
    for (pollfd& entry : entries)
      if (::poll(&entry, 1, 0) < 0) entry.revents = (entry.events & POLLRDHUP) != 0 ? POLLIN : 0;
  }
  std::map<int, short> events;
  for (const pollfd& entry : entries)
    if (entry.revents != 0) events[entry.fd] = entry.revents;
  return events;
}

}  // namespace

// Whether the process has ended. Text that it sent before can still be read afterwards.
bool Bootstrap::Watch::has_ended(const Events& events) {
  const bool is_lost = socket && !socket.has_its_file();
  if (is_lost) process->gone = PeerProcess::Gone::kUnwatched;
  bool is_over =
      is_lost || events_at(pidfd, events) != 0 || (events_at(socket, events) & ~POLLIN) != 0;
  const bool is_read = succeeds([&] {
    for (int i = 0; socket.has_its_file() && i < kMaxTextsAtOnce; ++i) {
      const auto message = recv_message(socket.get());
      if (!message) break;
      if (message->text.empty()) {  // where poll() is refused, this alone tells
        is_over = true;
        break;
      }
      const auto text = after_secret(secret, message->text);
      if (!text) {
        const auto why = refusal_in(message->text);
        // One that refuses has not ended: its pidfd goes on to tell. Another has taken its name.
        process->is_stranger = !why;
        is_over = !why || !pidfd || events_at(pidfd, events) != 0;
        process->exit_reason.keep(printable(is_over ? why.value_or("") : ""));
        process->refusal.keep(printable(why.value_or("")));
        return socket.reset();
      }
      if (!process->has_answered.exchange(true)) process->refusal.keep({});
      if (*text == kWatchedMessage && message->fd)
        process->recorder.keep(
            std::make_shared<const SharedMemory>(SharedMemory::of_peer(message->fd.get())));
      else if (*text == kExitMessage)
        process->has_exited = true;
      else if (text->starts_with(kRefusalMessage))
        process->refusal.keep(printable(text->substr(1)));
      else if (*text != kWatchedMessage)
        process->exit_reason.keep(printable(*text));
    }
  });
  if (!is_read) std::this_thread::sleep_for(kRetryPause);  // poll() would return at once
  if (is_over) process->end(pidfd.get());
  return is_over;
}

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

Bootstrap::Bootstrap() : listener_(listen_at(name_)) {
  wake_event_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_event_) throw_errno("eventfd");
  // Two threads may accept (report_exit()), and one of them then finds no connection.
  if (::fcntl(listener_.get(), F_SETFL, O_NONBLOCK) != 0) throw_errno("fcntl(O_NONBLOCK)");
  try_out();
  try {
    start_background_thread("ringcomm-boot", [this] { run(); }).detach();
  } catch (const std::system_error& error) {
    throw Error({.kind = ErrorKind::kSystem}, error.what());
  }
}

// Whether the system lets this process do what its thread, which has nobody to tell, has to.
void Bootstrap::try_out() {
  const UniqueFd one = connect_to(name_);
  if (!one) throw_errno("connect to the abstract Unix socket " + name_);
  UniqueFd other;
  for (int i = 0; !other && i < kMaxRequests; ++i) other = accept_at(listener_);
  if (!other) throw_errno("accept4");
  send_message(one.get(), kWatchedMessage);
  recv_message(other.get());
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
  for (Connection& connection : connections_) connection.socket.reset();
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
  const Address at(address);
  const auto deadline = deadline_after(timeout);
  for (int num_closed = 0; num_closed < kMaxRequests;) {
    const UniqueFd socket = request(at, key);
    if (!socket && errno != EAGAIN) return UniqueFd();
    while (!socket || !is_readable(socket.get(), std::min(timeout, kCheckInterval))) {
      if (look) look();
      check_accepts(address);
      if (RunningClock::now() >= deadline) return UniqueFd();
      if (!socket) break;
    }
    if (!socket) continue;
    RINGCOMM_STEP("before memory is received");
    auto message = recv_message(socket.get());
    if (!message || message->text.empty()) {
      ++num_closed;
      continue;
    }
    errno = EMFILE;
    if (message->has_lost_fd) throw_errno("recvmsg of a file descriptor");
    if (const auto why = refusal_in(message->text))
      throw Refused(credentials_of_peer(socket.get()).pid, *why);
    // Else another process has taken its name.
    const bool is_its = after_secret(at.answer_secret, message->text) == kMemoryMessage;
    return is_its ? std::move(message->fd) : UniqueFd();
  }
  return UniqueFd();
}

std::shared_ptr<PeerProcess> Bootstrap::watch(const std::string& address, pid_t pid,
                                              const std::string& host) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = watches_.find(address); found != watches_.end() && found->second.socket)
      return found->second.process;
  }
  const Address at(address);
  UniqueFd socket = request(at, kWatchRequest);
  if (!socket) return errno == EAGAIN ? std::make_shared<PeerProcess>(pid, host, address) : nullptr;
  const pid_t seen_pid = credentials_of_peer(socket.get()).pid;
  const std::lock_guard lock(mutex_);
  ::eventfd_write(wake_event_.get(), 1);  // the thread watches it, too
  // If another thread was faster, its watch is kept.
  auto [found, is_new] = watches_.try_emplace(address);
  Watch& watch = found->second;
  if (is_new) {
    watch.process = std::make_shared<PeerProcess>(seen_pid > 0 ? seen_pid : pid, host, address);
    watch.process->is_pid_hidden = seen_pid == 0;
    // None on kernels before 5.3, and of a hidden process: there the socket has to do.
    if (seen_pid > 0) watch.pidfd.reset(static_cast<int>(::syscall(SYS_pidfd_open, seen_pid, 0)));
    watch.secret = at.answer_secret;
  }
  if (!watch.socket) watch.socket = std::move(socket);
  return watch.process;
}

void Bootstrap::share_with_watchers(int fd, std::function<void()> look) {
  const std::lock_guard lock(mutex_);
  shared_fd_ = fd;
  look_ = std::move(look);
  ::eventfd_write(wake_event_.get(), 1);
}

void Bootstrap::report_exit(const std::string& reason) noexcept {
  const std::lock_guard current_lock(current_mutex);
  if (current == nullptr) return;
  current->accept_all();  // its thread may not have
  current->serve_all(nullptr);
  const std::lock_guard lock(current->mutex_);
  current->notify_watchers(reason.empty() ? kExitMessage : reason.substr(0, kMaxReasonBytes));
}

void Bootstrap::notify_watchers(const std::string& text) noexcept {
  for (const Connection& connection : connections_)
    if (connection.is_proven) succeeds([&] { answer(connection.socket.get(), text); });
}

void Bootstrap::run() {
  for (;;) {
    std::vector<pollfd> entries;
    const auto add = [&](const UniqueFd& fd, int events) {
      entries.push_back({.fd = fd.get(), .events = static_cast<short>(events), .revents = 0});
    };
    add(listener_, POLLIN);
    add(wake_event_, POLLIN);
    std::function<void()> look;
    bool has_unproven = false;
    {
      const std::lock_guard lock(mutex_);
      look = look_;
      for (const auto& [address, watch] : watches_) {
        add(watch.pidfd, POLLIN);
        add(watch.socket, POLLIN | POLLRDHUP);
      }
      for (const Connection& connection : connections_) {
        add(connection.socket, POLLIN | POLLRDHUP);
        has_unproven |= !connection.is_proven;
      }
    }
    const Events events = wait_for_events(std::move(entries), look || has_unproven ? kLookMs : -1);
    if (look) succeeds(look);
    eventfd_t count = 0;
    if (events_at(wake_event_, events) != 0) ::eventfd_read(wake_event_.get(), &count);
    accept_all();
    serve_all(&events);
    // Who closes all descriptors closes this one: the numbers of the others may be quiet files'.
    const bool may_be_lost = !listener_.has_its_file();
    const std::lock_guard lock(mutex_);
    for (auto next = watches_.begin(); next != watches_.end();) {
      Watch& watch = next->second;
      const bool has_news =
          events.contains(watch.pidfd.get()) || events.contains(watch.socket.get());
      const bool is_over = (has_news || may_be_lost) && watch.has_ended(events);
      next = is_over ? watches_.erase(next) : std::next(next);
    }
  }
}

void Bootstrap::accept_all() noexcept {
  for (int i = 0; i < kMaxAcceptsAtOnce; ++i) {
    UniqueFd socket = accept_at(listener_);
    const int code = socket ? 0 : errno;
    if (code == EAGAIN) return;
    if (code == EINTR) continue;
    succeeds([&] {
      const std::lock_guard lock(mutex_);
      num_refused_ = code == 0 ? 0 : num_refused_ + 1;
      if (num_refused_ == 0) set_refusal({});
      if (num_refused_ == kMaxAcceptRetries || code == EBADF)
        set_refusal("accepts no connections: " + describe_errno("accept4", code));
      if (!socket) return;
      if (const std::string why = why_untrusted(socket.get()); !why.empty())
        refuse(socket.get(), why);
      else
        connections_.push_back({std::move(socket), std::chrono::steady_clock::now()});
    });
    if (code == 0) continue;
    std::this_thread::sleep_for(kRetryPause);  // poll() would return at once
    return;
  }
}

// With the lock held. Who watches this process may wait for its answer at a new connection.
void Bootstrap::set_refusal(const std::string& why) {
  if (why == refusal()) return;
  refusal_.keep(why);
  notify_watchers(kRefusalMessage + why);
}

// Throws Refused if the process at `address` says to who watches it that it accepts nobody.
void Bootstrap::check_accepts(const std::string& address) {
  const std::lock_guard lock(mutex_);
  const auto found = watches_.find(address);
  if (found == watches_.end() || !found->second.socket) return;
  const PeerProcess& process = *found->second.process;
  if (const std::string why = process.refusal(); !why.empty()) throw Refused(process.pid, why);
}

// Those with news, or all.
void Bootstrap::serve_all(const Events* events) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase_if(connections_, [&](Connection& connection) {
    try {
      return !serve(connection, events == nullptr || events->contains(connection.socket.get()));
    } catch (const std::exception& error) {
      refuse(connection.socket.get(), std::string("failed: ") + error.what());
      return true;
    }
  });
  auto num_unproven = std::ranges::count(connections_, false, &Connection::is_proven);
  std::erase_if(connections_, [&](const Connection& connection) {  // the oldest
    return !connection.is_proven && num_unproven-- > kMaxUnproven;
  });
}

// Answers one request if there is one, with the lock held. False if the connection can be closed.
bool Bootstrap::serve(Connection& connection, bool has_news) {
  if (has_news && !connection.socket.has_its_file()) return false;
  const int socket = connection.socket.get();
  const auto message = has_news ? recv_message(socket) : std::nullopt;
  if (!message)
    return connection.is_proven ||
           std::chrono::steady_clock::now() < connection.since + kMaxSilence;
  const auto asked = after_secret(request_secret_, message->text);
  if (!asked) return false;
  connection.is_proven = true;
  if (*asked == kWatchRequest) {
    answer(socket, kWatchedMessage, shared_fd_);
    return true;
  }
  const auto found = offers_.find(*asked);
  const int fd = found != offers_.end() ? found->second.get() : -1;
  if (fd >= 0) RINGCOMM_STEP("before memory is sent");
  answer(socket, kMemoryMessage, fd);
  return false;
}

void Bootstrap::answer(int socket, const std::string& text, int fd) const {
  send_message(socket, answer_secret_ + " " + text, fd);
}

}  // namespace ringcomm::host
