#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/errors.h"
#include "host/fd.h"
#include "host/peer_process.h"
#include "host/process.h"

namespace ringcomm::host {

/// That another process does not do what it is asked for; `why` continues its name.
struct Refused : Error {
  Refused(pid_t pid, const std::string& reason)
      : Error({.kind = ErrorKind::kSystem, .pid = pid},
              "ringcomm: the process that has the memory (pid " + std::to_string(pid) + ") " +
                  reason),
        why(reason) {}

  std::string why;
};

/// The service of this process for its peer processes, shared by all groups: its thread hands out
/// memory handles over a Unix socket and detects the death of peers. By a pidfd, also if a forked
/// child still holds the socket, or by the end of the socket, also after exec() and if another PID
/// namespace hides the pid. It is never destroyed: a thread cannot be joined safely while the
/// process exits. All functions may be called from any thread and throw Error.
///
/// Requests and answers carry secrets that are in the process's address, and nowhere else
/// (docs/design/protocol.md, "Who may ask").
class Bootstrap {
 public:
  /// That of this process; a forked child creates its own.
  static Bootstrap& instance();

  /// For the records of this process's ranks: the name of the socket that peers connect to, the
  /// secret of their requests, and that of the answers.
  const std::string& address() const { return address_; }

  /// Lets processes that have the address fetch `fd` under `key` until it is withdrawn. The key is
  /// random: those of other groups have the address, too.
  void offer(const std::string& key, UniqueFd fd);
  /// Ends an offer and closes its descriptor. Does nothing if there is no such offer.
  void withdraw(const std::string& key);

  /// What the bootstrap at `address` offers under `key`; empty if it has no such offer or its
  /// process has ended. `look` is called about every 50 ms, and may end the wait by an exception.
  /// Throws Refused.
  UniqueFd fetch(const std::string& address, const std::string& key,
                 std::chrono::milliseconds timeout, const std::function<void()>& look = {});

  /// Watches the process whose bootstrap is at `address`, whose pid is `pid` in its PID namespace,
  /// and that runs on `host`; one watch per process, shared by all groups. Null if it has ended. It
  /// is that process once it `has_answered`: until then ask again.
  std::shared_ptr<PeerProcess> watch(const std::string& address, pid_t pid,
                                     const std::string& host = {});

  /// Why this process accepts no connections now, for messages; empty if it does.
  std::string refusal() const { return refusal_(); }

  /// Sends `fd` to every process that watches this one from now on (PeerProcess::recorder()), and
  /// calls `look` every few seconds on its thread. Once, before any process watches this one; `fd`
  /// and what `look` uses must stay.
  void share_with_watchers(int fd, std::function<void()> look);

  /// Tells the processes that watch this one that it is about to end, and why (256 bytes of it) if
  /// not by an exit. Does not wait, and does nothing in a process without a bootstrap.
  static void report_exit(const std::string& reason = {}) noexcept;

 private:
  using Events = std::map<int, short>;  // that poll() has found, by descriptor
  struct Watch {
    UniqueFd socket;
    UniqueFd pidfd;
    std::string secret;  // of its answers
    std::shared_ptr<PeerProcess> process;

    bool has_ended(const Events& events);
  };
  struct Connection {
    UniqueFd socket;
    std::chrono::steady_clock::time_point since;
    bool is_proven = false;  // has shown the secret
  };

  Bootstrap();
  void try_out();
  void run();
  void accept_all() noexcept;
  void set_refusal(const std::string& why);
  void check_accepts(const std::string& address);
  void serve_all(const Events* events) noexcept;
  bool serve(Connection& connection, bool has_news);
  void notify_watchers(const std::string& text) noexcept;
  void answer(int socket, const std::string& text, int fd = -1) const;
  void close_all_in_child();

  std::string name_ = "ringcomm-" + random_text();
  std::string request_secret_ = random_text();
  std::string answer_secret_ = random_text();
  std::string address_ = name_ + " " + request_secret_ + " " + answer_secret_;
  UniqueFd listener_;
  UniqueFd wake_event_;

  // Guards the members below. Never held while another lock is taken, except a PeerProcess's or
  // that of refusal_.
  std::mutex mutex_;
  std::map<std::string, UniqueFd> offers_;
  std::map<std::string, Watch> watches_;  // by address
  std::vector<Connection> connections_;   // accepted; a watcher's stays as long as this process
  int num_refused_ = 0;                   // connections that the system has, one after another
  Replaced<std::string> refusal_;
  int shared_fd_ = -1;
  std::function<void()> look_;
};

/// A file descriptor that other processes can fetch while this object lives.
class Offer {
 public:
  explicit Offer(UniqueFd fd) { Bootstrap::instance().offer(key_, std::move(fd)); }
  ~Offer() { Bootstrap::instance().withdraw(key_); }
  Offer(const Offer&) = delete;
  Offer& operator=(const Offer&) = delete;

  const std::string& key() const { return key_; }
  /// Fetches what the bootstrap of a rank offers. Throws Error.
  static UniqueFd fetch(const std::string& address, int rank, const std::string& key) {
    UniqueFd fd = Bootstrap::instance().fetch(address, key, std::chrono::seconds(10));
    if (!fd)
      throw Error({.kind = ErrorKind::kSystem, .rank = rank},
                  "ringcomm: rank " + std::to_string(rank) + " did not send its memory descriptor");
    return fd;
  }

 private:
  const std::string key_ = random_text();
};

}  // namespace ringcomm::host
