#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "collectives/call.h"
#include "collectives/failure.h"
#include "collectives/send_recv.h"
#include "core/arch.h"
#include "host/group_state.h"
#include "host/rank_record.h"
#include "host/timed_store.h"
#include "host/wait.h"
#include "transport/messenger.h"

namespace ringcomm {

namespace host {
class Rendezvous;
}

/// Creates the messenger of a group. Collective: it returns on no rank before all ranks
/// have created theirs. Called at most once, and only if ranks share no memory or messages are
/// requested. Throws Error, and what its LookForRanks throws. Empty if there is no backend for
/// messages. `key` is GroupState::key().
using MakeMessenger =
    std::function<std::unique_ptr<Messenger>(const std::string& key, const LookForRanks& look)>;

/// A wait that ended without what it waited for; the Communicator turns it into an Error.
struct WaitFailed {
  WaitStatus status;
  int peer = -1;            ///< the rank at fault
  std::string detail = {};  ///< the messenger's message
};

/// A peer that made another call.
struct Mismatched {
  int peer;
  CallHeader theirs;
  std::string difference = {};  ///< in words, where the headers do not show it
};

/// Moves the data of a group: over shared memory, messages, or both. The Communicator handles order
/// and failures, a transport moves the bytes.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual GroupState& group_state() = 0;
  /// The sends and receives of this rank; called once.
  virtual std::unique_ptr<SendRecv> make_send_recv(Failure& failure, Stats& stats) = 0;

  /// Whether run() is quick and polls, so that the caller's thread may run it, and knows
  /// reduce_scatter_update_all_gather. Otherwise a thread of the group runs it while the caller
  /// sleeps, and the Communicator makes that call of a reduce_scatter and an all_gather.
  virtual bool shares_memory() const = 0;

  /// Sets the call's algorithm from values that are equal on all ranks.
  virtual void plan(Collective& call) const = 0;
  /// Runs a planned collective, on one thread at a time; checks every peer's header before its
  /// data. Throws WaitFailed, Mismatched.
  virtual Traffic run(const Collective& call, const WaitLimits& limits) = 0;

  /// Between two collectives, on one thread at a time with run(), again and again: what no call
  /// has used since the last time may go back to the system.
  virtual void return_idle_pages() {}

  /// Bytes of shared memory mapped for the group, touched or not.
  virtual std::size_t mapped_bytes() const = 0;
};

/// A transport for ranks that do not all share memory: messages, and shared memory inside the hosts
/// that have several ranks. Users' sends all go over messages, so that a receive from any source
/// sees every rank. With `is_flat` everything does. Collective over the group, whose ranks have
/// been found. Throws Error.
std::unique_ptr<Transport> make_message_transport(KeyValueStore& store, host::Rendezvous& ranks,
                                                  const PeerTable& peer_table,
                                                  const CommunicatorOptions& options,
                                                  const MakeMessenger& make_messenger,
                                                  bool is_flat);

}  // namespace ringcomm
