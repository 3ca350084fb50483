#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "collectives/call.h"
#include "collectives/failure.h"
#include "collectives/send_recv.h"
#include "core/arch.h"
#include "host/group_state.h"
#include "host/rank_record.h"
#include "host/timed_store.h"
#include "host/wait.h"

namespace ringcomm {

namespace host {
class Rendezvous;
}

/// Called about every kCheckInterval while the messenger connects, with the ranks that have
/// not arrived yet. Throws Error if one cannot arrive any more; the caller then checks a last time
/// whether all have arrived, because one may have arrived and ended since.
using LookForRanks = std::function<void(const std::vector<int>& missing)>;

/// How the wait for a message ended.
enum class [[nodiscard]] MessageEnd : std::uint8_t {
  kDone,     ///< sent and no longer read, or received
  kAborted,  ///< abort() was called
  kFailed,   ///< the connection to the peer failed; Message::failure() has the messenger's message
};

/// A send or a receive on its way.
class Message {
 public:
  /// Allowed once wait() has returned kDone or kFailed, or abort() of the messenger has returned:
  /// after kAborted the messenger may still use the buffer.
  virtual ~Message() = default;

  /// Blocks until the message has ended, without a deadline: the caller's watchdog ends waits by
  /// Messenger::abort(). One thread may wait, once.
  virtual MessageEnd wait() = 0;
  /// The sender of a received message; only after wait() returned kDone.
  virtual int source() const = 0;
  /// The messenger's error message for kFailed.
  virtual const std::string& failure() const = 0;
};

/// The messenger does not support a call. Thrown before anything is exchanged.
class Unsupported : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Messages between the ranks of a group. bindings/c10d_messages.cc adapts any backend of torch.
///
/// Messages of one sender, receiver and tag match in the order of their calls, and a receive has
/// room for its message, which may be shorter. Others may overtake each other. A send may wait for
/// its receive to be posted (as Gloo's does): no rank may wait for a send that a peer will only
/// receive after something else of this rank. All functions may be called from any thread.
class Messenger {
 public:
  using MessagePtr = std::unique_ptr<Message>;

  /// Tags are 0 to kMaxTag. Users' messages have those under kFirstReservedTag.
  static constexpr int kMaxTag = 0x7fffffff;
  static constexpr int kFirstReservedTag = 0x7f000000;
  static constexpr int kAnySource = -1;

  virtual ~Messenger() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// Whether a send waits until its receive is announced, and a receive may be left unfinished at
  /// the end of the group: then receives are posted ahead of their call.
  virtual bool announces_receives() const = 0;

  /// Start a message; neither blocks nor throws, errors are wait()'s. The buffer is the messenger's
  /// until the message has ended. No bytes at all are a message as well.
  virtual MessagePtr isend(int peer, int tag, const std::byte* data, std::size_t num_bytes) = 0;
  /// `peer` may be kAnySource; that alone throws, Unsupported, where the messenger cannot do it.
  virtual MessagePtr irecv(int peer, int tag, std::byte* data, std::size_t num_bytes) = 0;

  /// Ends all unfinished messages, also later ones, with kAborted; permanent. Every caller returns
  /// after the first call is complete, and may then destroy its messages and free their buffers.
  void abort() {
    std::call_once(aborted_, [this] { end_messages(); });
  }

 private:
  /// The implementation of abort(); called once. When it returns, the messages may be destroyed.
  virtual void end_messages() noexcept = 0;

  std::once_flag aborted_;
};

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
