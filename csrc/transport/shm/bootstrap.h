#pragma once

#include <atomic>
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

/// The service of this process for its peer processes, shared by all groups: it hands out memory
/// handles over a Unix socket and detects the death of peers. It has one thread, which sleeps in
/// poll(). It is never destroyed, because a thread cannot be joined safely while the process exits.
///
/// A peer's death is detected through a pidfd, also if a forked child still holds the socket, or
/// through the end of the socket, also after exec() and if another pid namespace hides the pid.
///
/// All functions may be called from any thread and throw Error.
class Bootstrap {
 public:
  /// The bootstrap of this process. A forked child creates its own and cannot use the parent's.
  static Bootstrap& instance();

  /// The name in Linux's abstract socket namespace that peers connect to; it leaves no file behind.
  const std::string& address() const { return address_; }

  /// Lets processes of the same user fetch `fd` under `key` until it is withdrawn.
  void offer(const std::string& key, UniqueFd fd);
  /// Ends an offer and closes its descriptor. Does nothing if there is no such offer.
  void withdraw(const std::string& key);

  /// Fetches what the bootstrap at `address` offers under `key`; an empty descriptor if it has no
  /// such offer or its process has ended. `look` is called about every 50 ms, and may end the wait
  /// by an exception.
  UniqueFd fetch(const std::string& address, const std::string& key,
                 std::chrono::milliseconds timeout, const std::function<void()>& look = {});

  /// Watches the process whose bootstrap is at `address`, and whose pid is `pid` in its own
  /// numbering; one watch per process, shared by all groups. Null if the process has ended.
  std::shared_ptr<PeerProcess> watch(const std::string& address, pid_t pid);

  /// Tells the processes that watch this one why it is about to end (at most 256 bytes), or that it
  /// is about to exit. Does not wait or throw, and does nothing in a process without a bootstrap.
  static void say_last_words(const std::string& text) noexcept;
  static void say_exit() noexcept;

  /// Returns the time after which it wants to be called again at the latest; negative: none.
  using Task = std::chrono::milliseconds (*)();
  /// Calls the one `task` on the bootstrap's thread, now and whenever that is about to sleep.
  void call_while_idle(Task task);

 private:
  struct Watch {
    UniqueFd socket;
    UniqueFd pidfd;
    std::shared_ptr<PeerProcess> process;
  };

  Bootstrap();
  void run();
  bool accept_connection();
  bool serve(int connection);
  static bool look_at(const Watch& watch);
  void wake();
  void close_all_in_child();

  std::atomic<Task> task_ = nullptr;
  std::string address_;
  UniqueFd listener_;
  UniqueFd wake_event_;

  // Guards the members below. Never held while a callback runs or another lock is taken, except a
  // PeerProcess's.
  std::mutex mutex_;
  std::map<std::string, UniqueFd> offers_;
  std::map<std::string, Watch> watches_;  // by address
  std::vector<UniqueFd> connections_;     // accepted; a watcher's stays as long as this process
};

}  // namespace ringcomm::shm
