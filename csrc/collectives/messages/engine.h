#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <vector>

#include "collectives/carrier.h"
#include "transport/messages/message_transport.h"
#include "transport/messages/message_watch.h"

namespace ringcomm {

/// The state in which collectives of one group run over messages, one after another, on one thread
/// at a time.
///
/// Messages and staging memory belong to the engine and not to the functions that use them: an
/// exception must not free what the transport still reads or writes.
class MessageEngine {
 public:
  /// The slices of collectives. Equal on all ranks.
  struct Cut {
    std::uint32_t num_slots = 2;  ///< receives of a ring that are posted ahead
    /// Of one message of a ring. A message costs much more than a slot in shared memory.
    std::size_t slot_bytes = 1 << 20;
    bool is_rank_ordered = false;  ///< reductions go from left to right over the ranks
  };

  struct Posted {
    MessageTransport::MessagePtr message;
    int peer;
  };
  /// A message that has been started and not been waited for.
  using Handle = std::list<Posted>::iterator;

  /// The ranks are the transport's, which must live as long.
  MessageEngine(MessageTransport& transport, const Cut& cut) : transport_(transport), cut_(cut) {}

  int rank() const { return transport_.rank(); }
  int world_size() const { return transport_.world_size(); }
  /// The rank in the whole group, of which the transport may have a subset only.
  int whole_rank(int peer) const { return transport_.whole_rank(peer); }
  const Cut& cut() const { return cut_; }

  /// Starts an operation; `operation` must live until finish() or drop().
  void begin(MessageWatch::Operation& operation) { operation_ = &operation; }

  Handle irecv(int peer, int tag, void* data, std::size_t num_bytes);
  Handle isend(int peer, int tag, const void* data, std::size_t num_bytes);
  /// Returns when the message is done, and forgets it. Throws Stopped naming the peer.
  void wait(Handle message);

  /// A send that is waited for in finish(), or after many more of its kind.
  void post_send(int peer, int tag, const void* data, std::size_t num_bytes);

  /// Memory until finish() or drop(), aligned for any element.
  std::byte* stage(std::size_t num_bytes);

  /// Ends the operation: waits for all sends. Throws as wait() does.
  void finish();
  /// Ends an operation that failed; the transport has been aborted.
  void drop();

 private:
  Handle keep(MessageTransport::MessagePtr message, int peer);

  MessageTransport& transport_;
  Cut cut_;
  MessageWatch::Operation* operation_ = nullptr;
  std::vector<std::unique_ptr<std::byte[]>> staging_;  // outlives the messages of this engine
  std::list<Posted> posted_;
  std::deque<Handle> sends_;  // of post_send()
};

}  // namespace ringcomm
