#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>

#include "collectives/algorithm.h"
#include "collectives/op_kind.h"
#include "kernels/common/types.h"
#include "kernels/updates/update_op.h"
#include "reduce/reduce_op.h"

namespace ringcomm {

/// The caller's name of an element type that is moved but not reduced. It is compared between ranks
/// and shown in messages. Padded with zeros; empty if DType names the type.
using ElementName = std::array<char, 16>;

/// The update of a chunk by its owner in reduce_scatter_update_all_gather: an optimizer step and
/// this rank's shard of the optimizer state, which has the chunk's length.
struct ShardUpdate {
  UpdateSpec spec;
  float* master = nullptr;  ///< null unless spec.has_master
  std::array<float*, 2> states = {};
};

/// One call of a collective, as one rank makes it.
///
/// `num_elems` is what one rank contributes or receives: the whole buffer of all_reduce, reduce and
/// broadcast, this rank's shard of reduce_scatter, all_gather, gather, scatter and all_to_all.
/// Buffers are contiguous. `inputs` and `outputs` are arrays of one pointer if the call has one
/// buffer, and of world_size pointers in rank order if it has a shard for every rank: inputs of
/// reduce_scatter, all_to_all and (at the root) scatter; outputs of all_gather, all_to_all and (at
/// the root) gather. An output may be the input it corresponds to, and otherwise shares no memory
/// with inputs: check_overlap().
///
/// If the shards differ, `input_elems` and `output_elems` give the number of elements of each of
/// `inputs` and `outputs`: both in all_to_all (whose num_elems is then 0), input_elems in
/// reduce_scatter and scatter, output_elems in all_gather and gather. The sizes are checked for
/// each pair of ranks.
///
/// reduce_scatter_update_all_gather has the gradient as its input and the parameters as its output,
/// num_elems of each and equal on all ranks before; `dtype` is the gradient's. Rank r owns chunk r
/// of ChunkLayout(num_elems, world_size), whatever the algorithm.
struct Collective {
  OpKind op = OpKind::kBarrier;
  DType dtype = DType::kByte;
  ElementName element_name = {};
  Reduction reduction = Reduction::kSum;
  Algorithm algorithm = Algorithm::kAuto;
  int root = -1;
  std::size_t num_elems = 0;
  const void* const* inputs = nullptr;
  void* const* outputs = nullptr;
  const std::size_t* input_elems = nullptr;   ///< null: num_elems each
  const std::size_t* output_elems = nullptr;  ///< null: num_elems each
  const ShardUpdate* update = nullptr;        ///< of reduce_scatter_update_all_gather
  bool is_counted = true;                     ///< in Stats: of the program, not of the library

  std::size_t num_bytes() const { return num_elems * element_bytes(dtype); }
  /// Elements of the shard for, or from, a rank.
  std::size_t input_shard(int rank) const {
    return input_elems != nullptr ? input_elems[rank] : num_elems;
  }
  std::size_t output_shard(int rank) const {
    return output_elems != nullptr ? output_elems[rank] : num_elems;
  }
  /// Whether some shard of this rank's has another size than num_elems.
  bool is_uneven(int world_size) const;
};

/// What one rank of a collective with shards has for another one, or expects from it.
struct CallPart {
  void* data;
  std::size_t num_elems;
};
/// Nothing where there is no transfer between the two: beside the root of a gather or scatter, and
/// in a collective without shards.
std::optional<CallPart> part_given(const Collective& call, int rank, int to);
std::optional<CallPart> part_taken(const Collective& call, int rank, int from);

/// The reduction operator of a call. Throws std::invalid_argument where the reduction has no
/// meaning for the type.
inline const ReduceOp& reduce_op_of(const Collective& call) {
  const ReduceOp* op = cpu::find_reduce_op(call.reduction, call.dtype);
  if (op == nullptr)
    throw std::invalid_argument(std::string("reduction ") + name_of(call.reduction) +
                                " is not defined for " + name_of(call.dtype));
  return *op;
}
/// The reduction of all steps but the last one, which divides for an average.
inline Reduction undivided(Reduction reduction) {
  return reduction == Reduction::kAvg ? Reduction::kSum : reduction;
}
/// The divisor of the last step of the reduction.
inline int divisor_of(const Collective& call, int world_size) {
  return call.reduction == Reduction::kAvg ? world_size : 1;
}
/// Elements at `elems` of a buffer of `element_bytes` each.
inline const std::byte* at(const void* buffer, std::size_t elems, std::size_t element_bytes) {
  return static_cast<const std::byte*>(buffer) + elems * element_bytes;
}
inline std::byte* at(void* buffer, std::size_t elems, std::size_t element_bytes) {
  return static_cast<std::byte*>(buffer) + elems * element_bytes;
}

/// Throws std::invalid_argument where an input and an output share memory and the output is not the
/// one in place: all ranks that may still need the input would read results.
void check_overlap(const Collective& call, int rank, int world_size);

}  // namespace ringcomm
