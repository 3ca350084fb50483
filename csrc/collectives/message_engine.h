#pragma once

#include <cstddef>
#include <cstdint>

#include "collectives/carrier.h"
#include "collectives/collective.h"
#include "transport/messages/message_transport.h"
#include "transport/messages/message_watch.h"

namespace ringcomm {

/// The state in which collectives of one group run over messages, one after another, on one thread
/// at a time.
class MessageEngine {
 public:
  /// How collectives are cut. Equal on all ranks.
  struct Cut {
    std::uint32_t num_slots = 2;         ///< receives posted ahead
    std::size_t slot_bytes = 256 << 10;  ///< of one message of a ring
    bool is_rank_ordered = false;        ///< reduce from left to right over the ranks
  };

  /// The ranks are the transport's.
  MessageEngine(MessageTransport& transport, const Cut& cut);

  int rank() const { return transport_.rank(); }
  int world_size() const { return transport_.world_size(); }
  const Cut& cut() const { return cut_; }

  /// The operation whose messages come next; `operation` must live until they have ended.
  void begin(MessageWatch::Operation& operation) { operation_ = &operation; }

  MessageTransport::MessagePtr isend(int peer, int tag, const void* data, std::size_t num_bytes);
  MessageTransport::MessagePtr irecv(int peer, int tag, void* data, std::size_t num_bytes);
  /// Returns when the message is done; throws Stopped naming `peer`.
  void wait(Message& message, int peer);

 private:
  MessageTransport& transport_;
  Cut cut_;
  MessageWatch::Operation* operation_ = nullptr;
};

}  // namespace ringcomm
