#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "cuda/kernels/memory.h"
#include "cuda/kernels/staging.h"
#include "kernels/common/types.h"
#include "kernels/updates/update_op.h"

namespace ringcomm::cuda {

/// The group. A captured graph replays with the same parameters, so nothing in them changes between
/// calls.
struct GroupFrame {
  Staging staging;
  Control* control = nullptr;
  /// `bases[row * world_size + rank]` is the local address of a rank's allocation; see Place.
  std::byte* const* bases = nullptr;
  /// The number of this rank's collective; unknown for messages and in a graph.
  static constexpr std::uint64_t kNoNumber = ~std::uint64_t{0};
  std::uint64_t launch = kNoNumber;
  std::uint64_t timeout_ns = 0;  ///< from the kernel's first wait that does not end immediately
  int rank = 0;
  int world_size = 1;

  /// Null if there is no place, and before the group has a table.
  RINGCOMM_HD std::byte* find(Place place, int owner) const {
    const Place row = place >> kPlaceOffsetBits;
    const std::uint64_t offset = place & ((Place{1} << kPlaceOffsetBits) - 1);
    if (row == kScratchRow) return staging.scratch(owner) + offset;
    if (row == 0 || bases == nullptr) return nullptr;
    const std::uint64_t idx =
        (row - 1) * static_cast<std::uint64_t>(world_size) + static_cast<std::uint64_t>(owner);
    return load_pack<Cached::kYes, std::byte*>(bases + idx) + offset;
  }
};

/// One call of a collective, as one rank makes it, or a piece of one. Of a call with one buffer the
/// first pointer is that.
struct KernelCall : GroupFrame {
  std::uint32_t header[kHeaderWords] = {};
  std::uint64_t header_digest = 0;

  DType dtype = DType::kByte;
  Reduction reduction = Reduction::kSum;
  int divisor = 1;  ///< of an average

  // By packets: 8-byte words of each shard that a block has, at most.
  std::uint32_t words_per_block = 0;

  /// Where they are. What this rank has for each rank, and wants from it.
  const std::byte* inputs[kMaxRanks] = {};
  std::byte* outputs[kMaxRanks] = {};
  std::uint64_t input_bytes[kMaxRanks] = {};
  std::uint64_t output_bytes[kMaxRanks] = {};

  // In place, and of a ring: elements that this rank reduces, or of the whole call.
  std::uint64_t num_elems = 0;
  /// The part of it, in elements, or of each shard of a move, in bytes, that this launch has if
  /// some rank stages.
  std::uint64_t piece_begin = 0, piece_size = ~std::uint64_t{0};
  Place input_places[kMaxRanks] = {};
  Place output_places[kMaxRanks] = {};
  std::uint32_t num_outputs = 0;                  ///< ranks that get the result: all, or this one
  std::uint32_t input_unit = 1, output_unit = 1;  ///< bytes of an element
  bool stages_inputs = false, stages_outputs = false;
  bool has_update = false;

  // For reduce_scatter_update_all_gather.
  UpdateScalars update = {};
  float* master = nullptr;
  float* states[2] = {};
};

/// A message to another rank, or from it.
struct P2pMessage {
  std::byte* data;
  std::uint64_t num_bytes;
  std::int32_t tag;
  std::int16_t peer;
  bool is_send;
  Place place = 0;  ///< of data that is sent, if peers have mapped it
};
static_assert(sizeof(P2pMessage) == 32);

/// Messages by channel: those to one rank, or from one, in order. They wait for no other channel's.
struct P2pCall : GroupFrame {
  static constexpr int kMaxMessages = 96;
  static constexpr int kMaxChannels = 2 * kMaxRanks;

  LinkUse use = LinkUse::kMessages;
  /// Whether some message is longer than a slot: it may be read where it is, by the kernels after
  /// the first.
  bool has_long = false;
  /// Whether the buffers of what is sent and of what is received are the same. Lanes alternate.
  bool is_in_place = false;
  std::uint32_t num_channels = 0;
  std::uint8_t first_of_channel[kMaxChannels + 1] = {};  ///< and where the last channel ends
  P2pMessage messages[kMaxMessages] = {};

  /// Bytes of a message that go in a slot.
  RINGCOMM_HD std::uint64_t slot_bytes() const {
    return staging.layout.link_slot_bytes - sizeof(Letter);
  }
  RINGCOMM_HD bool is_long(const P2pMessage& message) const {
    return message.num_bytes > slot_bytes();
  }
};

static_assert(sizeof(KernelCall) <= 4096 && sizeof(P2pCall) <= 4096, "what a launch can carry");

}  // namespace ringcomm::cuda
