#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "collectives/algorithm.h"
#include "collectives/collective.h"
#include "collectives/op_kind.h"
#include "host/rank_record.h"
#include "kernels/common/types.h"
#include "kernels/updates/update_op.h"

namespace ringcomm {

/// The values that must be equal on all ranks of a collective, except sizes of uneven shards. It
/// precedes the data of the first phase.
struct CallHeader {
  std::uint64_t seq = 0;
  std::uint64_t num_elems = 0;
  std::int32_t root = -1;
  OpKind op = OpKind::kBarrier;
  DType dtype = DType::kByte;
  Reduction reduction = Reduction::kSum;
  Algorithm algorithm = Algorithm::kAuto;
  bool is_uneven = false;  ///< this rank's shards differ in size, and follow in the first phase
  bool has_update = false;
  ElementName element_name = {};
  OpKind whole_op = OpKind::kBarrier;  ///< of a part inside a host: of the call over all hosts
  std::uint32_t whole = 0;             ///< likewise: the digest of its header
  UpdateSpec update = {};              ///< of reduce_scatter_update_all_gather, and of its parts

  /// The bytes that peers need. Most calls omit the last member, which would cost a cache line.
  std::size_t num_wire_bytes() const {
    return has_update ? sizeof(CallHeader) : offsetof(CallHeader, update);
  }

  friend bool operator==(const CallHeader&, const CallHeader&) = default;
};
static_assert(sizeof(CallHeader) == kCallHeaderBytes);
static_assert(offsetof(CallHeader, update) <= 64 - 8, "leaves room for a cursor in its cache line");

/// The header of a rank's call number `seq`, of `world_size` ranks. A plan sets the algorithm.
CallHeader header_of(const Collective& call, std::uint64_t seq, int world_size);

/// What two headers of one call have in common, whatever the sizes.
CallHeader without_sizes(CallHeader header);
bool is_same_call(const CallHeader& a, const CallHeader& b);
/// With a digest for the size, where shards differ in size in the same way on all ranks: those of
/// an uneven reduce_scatter or all_gather.
CallHeader with_digest_of_shards(CallHeader header, const Collective& call, int world_size);
/// Of what ranks of one host have in common in one call.
std::uint32_t digest_of(CallHeader header);

/// "all_reduce #118 (sum, bfloat16, 8388608 bytes, two_shot)"
std::string describe(const CallHeader& header);
/// "rank 1 called broadcast #7 (...) instead", for a message that has named this rank's call, which
/// is an `our_op`. If only one of the two calls is a barrier or a broadcast, it asks about the
/// likely cause.
std::string describe_difference(int peer, const CallHeader& theirs, const std::string& our_op);
/// The same of what `from` has for `to`, and `to` expects.
std::string size_difference(int from, std::uint64_t has_bytes, int to, std::uint64_t expects_bytes);

}  // namespace ringcomm
