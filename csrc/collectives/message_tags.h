#pragma once

#include <cstdint>

#include "transport/messages/message_transport.h"

namespace ringcomm {

/// The tags of ringcomm's own messages, above the users'. A transport orders messages by pair and
/// tag.
struct MessageTags {
  static constexpr int kEnvelope = MessageTransport::kFirstReservedTag;
  static constexpr int kData = kEnvelope + 1;
  static constexpr int kReduceScatter = kEnvelope + 2;
  static constexpr int kAllGather = kEnvelope + 3;
  static constexpr int kChain = kEnvelope + 4;
  /// Collectives use so many; what a MessageSubset shifts them by is a multiple.
  static constexpr int kNumOfCollectives = 5;

  /// Never sent: a receive of it ends with the connection.
  static constexpr int kGuard = kEnvelope + 0xffff;
  /// Users' long messages that a pair has under way at once, before one of these is used again:
  /// then in order.
  static constexpr std::uint32_t kNumLong = 1U << 20;
  static constexpr int kFirstLong = MessageTransport::kMaxTag - static_cast<int>(kNumLong);
};

}  // namespace ringcomm
