#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
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
  std::atomic<bool> is_dead = false;
};

/// This process's end of everything that is per pair of processes and not per group: it hands
/// memory to peers over a Unix socket and notices their death. One thread, asleep in poll() but for
/// those events; made with the first group, never destroyed (a thread cannot be joined safely while
/// the process exits).
///
/// A peer's death is seen at once through a pidfd, or, where another pid namespace hides its pid,
/// through the end of the socket. The pidfd is the better one: a socket stays open as long as any
/// forked child of the peer holds it.
///
/// All functions may be called from any thread and throw Error.
class ProcessHub {
 public:
  /// The hub of this process. A forked child gets one of its own, and loses the parent's.
  static ProcessHub& instance();

  /// What peers connect to: a name in Linux's abstract socket namespace, which leaves no file
  /// behind.
  const std::string& address() const { return address_; }

  /// Lets processes of the same user fetch `fd` under `key`, `num_takes` times; then it is closed.
  void offer(const std::string& key, UniqueFd fd, int num_takes);
  /// Takes back what is left of an offer. Nothing happens when there is none.
  void withdraw(const std::string& key);
  /// Waits until an offer has been taken as often as it was made for. False when that takes longer.
  bool wait_until_taken(const std::string& key, std::chrono::steady_clock::time_point deadline);

  /// Fetches what the hub at `address` offers under `key`; nothing when it offers no such thing, or
  /// is no more.
  UniqueFd fetch(const std::string& address, const std::string& key,
                 std::chrono::milliseconds timeout);

  /// Watches the process whose hub is at `address`; one watch per process, shared by all groups.
  /// Null when there is no such process any more.
  std::shared_ptr<PeerProcess> watch(const std::string& address);

 private:
  struct Offer {
    UniqueFd fd;
    int num_takes_left = 0;
  };
  struct Watch {
    UniqueFd socket;
    UniqueFd pidfd;
    std::shared_ptr<PeerProcess> process;
  };

  ProcessHub();
  void run();
  void accept_connection();
  bool try_serve(int connection);
  bool serve(int connection);
  void look_at_watches(const std::map<int, short>& events);
  void wake();
  void close_all_in_child();

  std::string address_;
  UniqueFd listener_;
  UniqueFd wake_event_;

  std::condition_variable offers_changed_;
  // Guards what follows; never held while another lock is taken or a callback runs.
  std::mutex mutex_;
  std::map<std::string, Offer> offers_;
  std::map<std::string, Watch> watches_;  // by address
  std::vector<UniqueFd>
      connections_;  // accepted; a watcher's stays open as long as this process lives
};

}  // namespace ringcomm::shm
