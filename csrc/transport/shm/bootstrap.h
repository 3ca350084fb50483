#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/membership.h"
#include "transport/shm/fd.h"

namespace ringcomm::shm {

/// The service of this process for its peer processes, shared by all groups: its thread hands out
/// memory handles over a Unix socket and detects the death of peers. By a pidfd, also if a forked
/// child still holds the socket, or by the end of the socket, also after exec() and if another PID
/// namespace hides the pid. It is never destroyed: a thread cannot be joined safely while the
/// process exits. All functions may be called from any thread and throw Error.
class Bootstrap {
 public:
  /// That of this process; a forked child creates its own.
  static Bootstrap& instance();

  /// The name of the socket that peers connect to.
  const std::string& address() const { return address_; }

  /// Lets processes of the same user fetch `fd` under `key` until it is withdrawn.
  void offer(const std::string& key, UniqueFd fd);
  /// Ends an offer and closes its descriptor. Does nothing if there is no such offer.
  void withdraw(const std::string& key);

  /// What the bootstrap at `address` offers under `key`; empty if it has no such offer or its
  /// process has ended. `look` is called about every 50 ms, and may end the wait by an exception.
  UniqueFd fetch(const std::string& address, const std::string& key,
                 std::chrono::milliseconds timeout, const std::function<void()>& look = {});

  /// Watches the process whose bootstrap is at `address`, whose pid is `pid` in its own numbering,
  /// and that runs on `host`; one watch per process, shared by all groups. Null if it has ended.
  std::shared_ptr<PeerProcess> watch(const std::string& address, pid_t pid,
                                     const std::string& host = {});

  /// Sends `fd` to every process that watches this one from now on (PeerProcess::flight()), and
  /// calls `look` every few seconds on its thread. Once, before any process watches this one; `fd`
  /// and what `look` uses must stay.
  void share_with_watchers(int fd, std::function<void()> look);

  /// Tell the processes that watch this one why it is about to end (256 bytes of it), or that it is
  /// about to exit. They do not wait, and do nothing in a process without a bootstrap.
  static void say_last_words(const std::string& text) noexcept;
  static void say_exit() noexcept;

 private:
  struct Watch {
    UniqueFd socket;
    UniqueFd pidfd;
    std::shared_ptr<PeerProcess> process;
  };

  Bootstrap();
  void run();
  void accept_all() noexcept;
  bool serve(int connection);
  void close_all_in_child();

  std::string address_;
  UniqueFd listener_;
  UniqueFd wake_event_;

  // Guards the members below. Never held while another lock is taken, except a PeerProcess's.
  std::mutex mutex_;
  std::map<std::string, UniqueFd> offers_;
  std::map<std::string, Watch> watches_;  // by address
  std::vector<UniqueFd> connections_;     // accepted; a watcher's stays as long as this process
  int shared_fd_ = -1;
  std::function<void()> look_;
};

}  // namespace ringcomm::shm
