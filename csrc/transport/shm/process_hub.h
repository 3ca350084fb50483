#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/shm/unique_fd.h"

namespace ringcomm::shm {

/// Another process, watched until it ends.
struct PeerProcess {
  pid_t pid = -1;           ///< in this process's numbering; 0 where another pid namespace hides it
  std::string hub_address;  ///< of its ProcessHub; empty where it had ended before it was watched
  std::atomic<bool> is_dead = false;  ///< ended, or runs another program

  /// Whether it is stopped, by SIGSTOP or a debugger; false where the kernel does not say.
  bool is_stopped() const;

  /// What it said last of why it ends, such as an uncaught exception: printable ASCII. Empty where
  /// it said nothing.
  std::string last_words() const;
  void keep_last_words(std::string words);

 private:
  mutable std::mutex mutex_;
  std::string last_words_;
};

/// This process's end of everything that is per pair of processes and not per group: it hands
/// memory to peers over a Unix socket and notices their death. One thread, asleep in poll() but for
/// those events; made with the first group, never destroyed (a thread cannot be joined safely while
/// the process exits).
///
/// A peer's end is seen at once through a pidfd or the end of the socket, whichever is first. The
/// pidfd tells when a forked child still holds the socket; the socket tells when the process has
/// replaced itself by exec(), or when another pid namespace hides its pid.
///
/// All functions may be called from any thread and throw Error.
class ProcessHub {
 public:
  /// The hub of this process. A forked child gets one of its own, and loses the parent's.
  static ProcessHub& instance();

  /// What peers connect to: a name in Linux's abstract socket namespace, which leaves no file
  /// behind.
  const std::string& address() const { return address_; }

  /// Lets processes of the same user fetch `fd` under `key` until it is withdrawn.
  void offer(const std::string& key, UniqueFd fd);
  /// Ends an offer and closes its descriptor. Nothing happens when there is none.
  void withdraw(const std::string& key);

  /// Fetches what the hub at `address` offers under `key`; nothing when it offers no such thing, or
  /// its process has ended. `look` is called about every 50 ms while the hub does not answer; what
  /// it throws ends the wait.
  UniqueFd fetch(const std::string& address, const std::string& key,
                 std::chrono::milliseconds timeout, const std::function<void()>& look = {});

  /// Watches the process whose hub is at `address`; one watch per process, shared by all groups.
  /// Null when there is no such process any more.
  std::shared_ptr<PeerProcess> watch(const std::string& address);

  /// Tells the processes that watch this one why it is about to end (256 bytes at most). Waits for
  /// none of them, throws nothing, and does nothing in a process without a hub.
  static void say_last_words(const std::string& text) noexcept;

 private:
  struct Watch {
    UniqueFd socket;
    UniqueFd pidfd;
    std::shared_ptr<PeerProcess> process;
  };

  ProcessHub();
  void run();
  bool accept_connection();
  void try_accept();
  bool try_serve(int connection);
  bool serve(int connection);
  static void listen_to(const Watch& watch);
  void look_at_watches(const std::map<int, short>& events);
  void wake();
  void close_all_in_child();

  std::string address_;
  UniqueFd listener_;
  UniqueFd wake_event_;

  // Guards what follows; never held while a callback runs or another lock is taken, but for a
  // PeerProcess's.
  std::mutex mutex_;
  std::map<std::string, UniqueFd> offers_;
  std::map<std::string, Watch> watches_;  // by address
  std::vector<UniqueFd>
      connections_;  // accepted; a watcher's stays open as long as this process lives
};

}  // namespace ringcomm::shm
