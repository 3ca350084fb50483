#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/arch.h"
#include "core/errors.h"

// Who the ranks of a group are, and why a group is no more.

namespace ringcomm {

namespace shm {
class PeerMemory;
class SharedMemory;
}  // namespace shm

/// What the library needs of a store that all ranks of a group share (an adapter to torch's Store).
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  /// All but is_interrupted() throw std::exception when the store cannot be reached.
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Nothing when the key is not there now.
  virtual std::optional<std::string> try_get(const std::string& key) = 0;
  /// Sets the key if it is not there yet; where the store cannot tell, in any case.
  virtual void set_first(const std::string& key, const std::string& value) = 0;
  /// Whether a signal has asked this process to stop waiting.
  virtual bool is_interrupted() { return false; }
  /// The same store for another thread: with a connection of its own, where it has connections.
  virtual std::unique_ptr<KeyValueStore> clone() = 0;
};

/// Another process, watched until it ends if it is on this machine.
struct PeerProcess {
  explicit PeerProcess(pid_t its_pid = -1, std::string its_host = {}, std::string address = {})
      : pid(its_pid), host(std::move(its_host)), bootstrap_address(std::move(address)) {}

  /// In this process's numbering, or its own where another PID namespace hides it.
  pid_t pid;
  std::string host;               ///< its name, for messages
  std::string bootstrap_address;  ///< of its Bootstrap; empty if it is not, or was never, watched
  bool is_pid_hidden = false;
  std::atomic<bool> is_confirmed = false;  ///< by its pid or its answer: Bootstrap::watch()
  std::atomic<bool> is_dead = false;       ///< ended, or runs another program
  /// The processes that this one has seen end; increased after is_dead.
  static std::atomic<std::uint64_t> num_ended;
  /// An eventfd that is written after num_ended is increased; -1 while nobody waits for deaths.
  static std::atomic<int> death_event;
  /// By itself, as far as it or the kernel has told; known before is_dead is set, as the next.
  std::atomic<bool> has_exited = false;
  /// What is_dead means: it has ended; it runs another program, or has closed all descriptors; or
  /// this process has.
  enum class Gone { kEnded, kRunsOn, kUnwatched };
  std::atomic<Gone> gone = Gone::kEnded;
  /// As wait() gives it; -1 if the kernel does not tell.
  std::atomic<int> wait_status = -1;

  /// Whether it is stopped by SIGSTOP or a debugger; false if the kernel does not tell.
  bool is_stopped() const;
  /// The CPU time that it has taken; none if the kernel does not tell.
  std::optional<std::uint64_t> cpu_ms() const;
  /// Its last report of why it ends, such as an uncaught exception; printable, and may be empty.
  std::string last_words() const;
  void keep_last_words(std::string words);
  /// Why it does not let this process watch it, or accepts no connections now; empty if it does.
  std::string refusal() const;
  void keep_refusal(std::string why);
  /// It has ended: asks the kernel how. `pidfd` may be -1.
  void end(int pidfd);
  /// The end of an error message about it: " died (signal 9, Killed); read the end of its output".
  /// `when` and `detail` may be empty.
  std::string how_it_ended(const std::string& when, const std::string& detail) const;
  /// Its flight recorder, as this process maps it, also after its end; null if it has sent none.
  std::shared_ptr<const shm::SharedMemory> flight() const;
  void keep_flight(int fd);
  /// Its buffers, as this process maps them; one for all groups that hold the pointer.
  std::shared_ptr<shm::PeerMemory> memory() const;

 private:
  mutable std::mutex mutex_;  // guards the next ones
  mutable std::weak_ptr<shm::PeerMemory> memory_;
  std::string last_words_;
  std::string refusal_;
  std::shared_ptr<const shm::SharedMemory> flight_;
};

/// By rank. Of this rank's own process, and of one on another machine, only pid and host are known.
using PeerProcesses = std::vector<std::shared_ptr<PeerProcess>>;

/// What a rank's own messages begin with: "ringcomm rank 0/2: ", with a global rank that differs.
std::string prefix_of(int rank, int world_size, int global_rank);
/// A process in error messages: "rank 1 (pid 12 on host)", "rank 1" if it was never found, or "rank
/// 1 of the group (global rank 3, pid 12 on host)" where the default group numbers it otherwise.
/// `global_rank` is -1 if it has no such number.
std::string name_of_process(int rank, int global_rank, const PeerProcess& process);

/// Why a group is no more.
struct AbortReason {
  ErrorKind kind = ErrorKind::kAborted;
  int origin = -1;   ///< the rank that failed
  int culprit = -1;  ///< the rank that it blames, or -1
  std::string text;

  /// That rank `origin` fails with this error.
  static AbortReason of(const std::exception& error, int origin);
  std::string to_text() const;
  static AbortReason from_text(const std::string& text);
};

/// What this rank has just done with `rank` in a collective: waited, or exchanged messages. With
/// nothing but the rank: it waits, for long already.
struct PeerEvent {
  int rank;
  std::uint64_t waited_ticks = 0;  ///< of flight::ticks()
  bool is_arrival = false;         ///< it waited for the rank to begin the collective
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
};

/// Which of several waits of a collective a rank is in: the step, and the slice of the data that
/// takes these steps. All from 1 on; 0 where it is not known.
struct alignas(8) CallStep {
  std::uint16_t step = 0, num_steps = 0, slice = 0, num_slices = 0;

  constexpr CallStep() = default;
  constexpr CallStep(int step_now, int steps, std::size_t slice_now, std::size_t slices)
      : step(static_cast<std::uint16_t>(step_now)), num_steps(static_cast<std::uint16_t>(steps)) {
    if (slices > UINT16_MAX) return;  // more than 16 GiB for each rank
    slice = static_cast<std::uint16_t>(slice_now);
    num_slices = static_cast<std::uint16_t>(slices);
  }
};

/// The ranks of a group and its shared abort state.
class Membership {
 public:
  virtual ~Membership() = default;

  const PeerProcesses& processes() const { return processes_; }
  const PeerProcess& process_of(int rank) const {
    return *processes_[static_cast<std::size_t>(rank)];
  }
  /// The number in the default group; -1 if there is none. A process may be in groups with several.
  int global_rank_of(int rank) const { return global_ranks_[static_cast<std::size_t>(rank)]; }
  std::string name_of(int rank) const {
    return name_of_process(rank, global_rank_of(rank), process_of(rank));
  }
  /// Whether the process of `rank` is known to have ended; also of a group that has been aborted.
  bool has_died(int rank) const { return process_of(rank).is_dead; }
  /// The same on all ranks of the group, and of no other group.
  const std::string& key() const { return key_; }
  /// Whether this rank may wait for `rank`, from what it knows: kNone, kPeerDied, kPeerLeft or, for
  /// the whole group, kAborted.
  virtual Stop state_of(int rank) const = 0;
  /// Whether `rank` is known to have destroyed its side of the group.
  virtual bool has_left(int rank) const = 0;
  /// The number of collectives that `rank` has begun; -1 if that is not known.
  virtual std::int64_t num_calls_of(int rank) const = 0;
  /// Called in the thread of a collective; set once.
  void on_peer_event(std::function<void(const PeerEvent&, CallStep)> record) {
    record_ = std::move(record);
  }
  void record(const PeerEvent& event) const {
    if (record_) record_(event, step_);
  }
  /// Of the events to come; in the thread of a collective.
  CallStep& step() { return step_; }

  /// Whether a rank has begun to abort the group: as this rank knows or, with `asks`, can read.
  virtual bool is_given_up(bool asks) noexcept = 0;
  /// Ends all ranks' waits, with this reason unless another rank has aborted the group before.
  virtual void abort(const AbortReason& reason) = 0;
  /// The reason of the first rank that aborted; only after a wait ended with Stop::kAborted.
  virtual AbortReason abort_reason() const = 0;

 protected:
  PeerProcesses processes_;  // set when the group is made, as the next; none null
  std::vector<int> global_ranks_;
  std::string key_;

 private:
  std::function<void(const PeerEvent&, CallStep)> record_;
  CallStep step_;
};

/// The size of CallHeader (which asserts it): ranks compare it in their records.
inline constexpr std::size_t kCallHeaderBytes = 104;

/// The record that each rank publishes in the store before ranks share memory.
struct RankRecord {
  std::string host_id;                 ///< equal for processes that share memory with each other
  std::string host;                    ///< its name, for messages
  std::string bootstrap_address = {};  ///< where its bootstrap listens, and its secrets
  pid_t pid = -1;
  std::string memory_key = {};  ///< random; names memory that it may offer for this group
  std::string options;
  std::string machine_id = {};     ///< equal for processes that can watch each other
  int world_size = 0;              ///< of the group that it makes
  std::string global_ranks = {};   ///< of that group, as text; empty where it has no such numbers
  std::string pid_namespace = {};  ///< in which `pid` is its number
  int attempt = 1;                 ///< how often it has begun to make this group over this store
  AbortReason failure = {};        ///< why it could not make it; without a text until it fails

  std::string to_text() const;
  /// Throws Error if the text is not a record of this version of ringcomm.
  static RankRecord from_text(const std::string& text);
};

/// The boot and the network namespace of this process: abstract Unix sockets reach no further.
/// RINGCOMM_HOST_ID replaces it.
std::string host_id();
/// The same whatever RINGCOMM_HOST_ID is, and the user: a bootstrap answers its own user only.
std::string machine_id();
/// Of this process, or empty where the kernel does not tell.
std::string pid_namespace();
/// Of this machine; letters that are not of ASCII are ?.
std::string host_name();

/// The hosts of a group's ranks, which may be on them in any order. The same on all ranks: hosts
/// are numbered in the order of their first ranks.
class PeerTable {
 public:
  /// `records` are indexed by rank; at least one.
  explicit PeerTable(const std::vector<RankRecord>& records);

  int world_size() const { return static_cast<int>(places_.size()); }
  int num_hosts() const { return static_cast<int>(hosts_.size()); }
  /// The ranks of a host, ascending.
  const std::vector<int>& ranks_on(int host) const {
    return hosts_[static_cast<std::size_t>(host)];
  }
  int num_ranks_on(int host) const { return static_cast<int>(ranks_on(host).size()); }
  int host_of(int rank) const { return places_[static_cast<std::size_t>(rank)].first; }
  /// The index of `rank` among the ranks of its host.
  int local_rank_of(int rank) const { return places_[static_cast<std::size_t>(rank)].second; }
  /// The first rank of a host.
  int leader_of(int host) const { return ranks_on(host).front(); }

  /// "2 hosts: alpha (ranks 0 2), beta (rank 1)"
  std::string describe() const;

 private:
  std::vector<std::string> names_;           // of hosts
  std::vector<std::vector<int>> hosts_;      // their ranks
  std::vector<std::pair<int, int>> places_;  // by rank: host, and rank there
};

}  // namespace ringcomm
