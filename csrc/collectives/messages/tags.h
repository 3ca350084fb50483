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
  /// The number of tags of collectives; a MessageSubset shifts by a multiple of it.
  static constexpr int kNumOfCollectives = 5;

  /// Never sent: a receive of it ends with the connection.
  static constexpr int kGuard = kEnvelope + 0xffff;
  /// Sends and receives of the engine's own, whose tags are above the users' 32 bits.
  static constexpr int kFirstInternal = kEnvelope + 0x100000;
  static constexpr std::uint64_t kNumInternal = 0x100000;
  /// The tags of users' long messages of a pair, used in turn; messages with one tag are in order.
  static constexpr std::uint32_t kNumLong = 1U << 20;
  static constexpr int kFirstLong = MessageTransport::kMaxTag - static_cast<int>(kNumLong);

  static constexpr bool is_internal(std::uint64_t tag) { return tag >> 32U != 0; }
  /// The transport's tag for a tag of a send or receive. Kinds of internal messages differ in bits
  /// 32 and 33. The messages of a kind are numbered; two that are about 500,000 apart share a tag
  /// and are in order.
  static constexpr int of(std::uint64_t tag) {
    if (!is_internal(tag)) return static_cast<int>(tag);
    return kFirstInternal +
           static_cast<int>(((tag >> 33U) * (kNumInternal / 2) + tag % (kNumInternal / 2)) %
                            kNumInternal);
  }
};

}  // namespace ringcomm
