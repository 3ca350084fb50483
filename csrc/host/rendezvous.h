#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/errors.h"
#include "host/bootstrap.h"
#include "host/rank_record.h"
#include "host/shared_memory.h"
#include "host/timed_store.h"
#include "host/wait.h"

namespace ringcomm::host {

struct GroupTerms {
  int rank = 0;
  int world_size = 1;
  /// The options that must be equal on all ranks, in readable form ("algorithm=auto num_slots=2").
  std::string options = {};
  std::string host_id = {};                      ///< the host's identity; empty for host_id()
  std::vector<std::uint64_t> global_ranks = {};  ///< of the ranks, if they have such numbers
  PeerProcesses known = {};  ///< the ranks' processes, from another group; null or missing: unknown
  bool shares_memory = true;  ///< whether ranks of one host will; implies that sockets reach them
  bool is_one_host = true;    ///< whether another host is an error
  bool log_waits = false;     ///< whether one rank says for whom it waits for long
};

/// How the ranks of a group find each other, and how the ranks of one host come to share memory.
///
/// Every rank publishes a record in the store, reads the others', which rank 0 collects in a table,
/// and starts watching the processes on its own machine. The first rank of each host offers the
/// memory that its ranks share. A record that is there at the first look may be of an earlier
/// group. Every wait checks at least every 50 ms the processes found so far, the deadline, and
/// signals, and within a second whether a rank has failed.
class Rendezvous {
 public:
  /// `store` must outlive this object.
  Rendezvous(KeyValueStore& store, const GroupTerms& terms, std::chrono::milliseconds timeout);
  /// Withdraws the memory from the bootstrap.
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  /// Collective, first. Throws Error: kTimeout for a rank that does not appear, kPeerDied for one
  /// that ended, kInterrupted, kMismatch for other options, kSystem for a host that may not be.
  PeerTable find_ranks();
  /// Collective over the ranks of a host (`ranks`, ascending), after find_ranks(): maps the memory
  /// of the first of them. Throws the same.
  SharedMemory share_memory(const std::vector<int>& ranks, std::size_t num_bytes);
  /// Random, of the attempt of `rank` to make this group that its record is of now. Throws like
  /// find_ranks().
  std::string key_of(int rank);
  /// From now on a record whose key is not among these is an error: the rank has failed meanwhile.
  void expect(const std::string& keys) { expected_keys_ = keys; }
  /// Of the rank whose memory share_memory() has mapped.
  const std::string& memory_key() const { return memory_key_; }
  /// Waits until `has_come` is true of every other rank. Throws like find_ranks(). Or until
  /// `has_answer`, which rank 0 gives once all have come, so that N ranks need O(N) requests: ranks
  /// are asked about after a second, one at a time, and before a time-out names them.
  void wait_for_all(const std::function<bool(int peer)>& has_come,
                    const std::function<bool()>& has_answer = {},
                    const char* what = "did not join the group");

  /// For polls until all ranks have joined. Throws kPeerDied if any has ended, and like
  /// check_time().
  void look(const std::vector<int>& missing, const std::string& what);
  /// Throws Error: what another rank has failed with, kPeerDied for a rank of another host than
  /// this one's, kInterrupted, or once time is up kTimeout, which says that the ranks `missing` did
  /// not do `what`. It blames a stopped rank, or else the first of them.
  void check_time(std::vector<int> missing, const std::string& what);
  /// Throws Error of kPeerDied, or what the rank failed with before it ended.
  [[noreturn]] void throw_died(int peer);
  /// Throws Error of what another rank has failed with.
  [[noreturn]] void throw_reported(const AbortReason& reason);
  /// Adds the reason why this rank fails to its record, at any time; the first is kept. Returns it:
  /// that of another rank, if this one fails because of that.
  AbortReason report_failure(const std::exception& error);
  /// When the group is made: no rank needs this one's record, and a later group must not find it.
  void withdraw_record();

  int rank() const { return terms_.rank; }
  int world_size() const { return terms_.world_size; }
  RunningClock::time_point deadline() const { return deadline_; }
  const RankRecord& mine() const { return mine_; }
  /// After find_ranks().
  const RankRecord& record_of(int rank) const { return peer_of(rank).record; }
  const PeerProcesses& processes() const { return processes_; }
  /// The number of a rank in the default group; -1 if there is none.
  int global_rank_of(int rank) const;

 private:
  using Clock = RunningClock;
  static constexpr std::chrono::seconds kGlooLookInterval{1};
  static constexpr std::chrono::seconds kWarnAfter{10};

  struct Peer {
    std::string text = {};  // its record, once it is accepted
    RankRecord record = {};
    std::optional<std::string> first_text = {};    // what was there at the first look
    std::string unverified_text = {};              // the last one that was not accepted
    Clock::time_point unverified_since = {};       // when it was first seen
    std::shared_ptr<PeerProcess> unanswered = {};  // that this rank has connected to
  };

  SharedMemory fetch_memory(int leader, std::size_t num_bytes);

  Peer& peer_of(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const Peer& peer_of(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  const PeerProcess& process_of(int rank) const {
    return *processes_[static_cast<std::size_t>(rank)];
  }
  bool is_found(int peer) const { return !peer_of(peer).text.empty(); }
  std::string read_record(int rank);
  bool read_table();
  bool find(int peer);
  bool accept(int peer, const std::string& text);
  bool is_current(const RankRecord& theirs, const std::string& text, int peer) const;
  std::shared_ptr<PeerProcess> find_process(const RankRecord& theirs, int peer, bool is_trusted);
  void look_for_failures();
  void warn_of_missing(const std::vector<int>& missing, const std::string& what);
  std::string gloo_text(std::vector<int> missing);
  void count_attempts();
  std::string name_of(int rank) const {
    return name_of_process(rank, global_rank_of(rank), process_of(rank));
  }
  std::string listed(const std::vector<int>& ranks) const {
    return name_of_ranks(ranks, terms_.global_ranks);
  }
  bool is_replaced();
  bool has_died(int peer);

  [[noreturn]] void fail(ErrorKind kind, int peer, const std::string& text) const;

  KeyValueStore& store_;
  GroupTerms terms_;
  std::chrono::milliseconds timeout_;
  Clock::time_point deadline_;
  Bootstrap* bootstrap_ = nullptr;  // from find_ranks() on
  RankRecord mine_;
  std::vector<Peer> peers_;  // by rank
  PeerProcesses processes_;
  std::string memory_key_;
  std::string expected_keys_;  // empty until all are known
  std::vector<int> sharing_;   // the ranks of this host, from share_memory() on
  Clock::time_point next_look_ = Clock::now() + kCheckInterval;  // at the other ranks' records
  int next_looked_at_ = 0;
  bool has_reported_ = false;
  bool has_news_ = false;  // a record that was not there at the look before
  Clock::time_point began_at_ = Clock::now();
  Clock::time_point warns_at_;
};

}  // namespace ringcomm::host
