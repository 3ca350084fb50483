#include "collectives/owner_update.h"

#include <algorithm>
#include <cstring>

#include "collectives/reduction.h"

namespace ringcomm {
namespace {

// The reduced gradient of one block; with the block's parameters and state it fits an L1 cache of
// 32 KiB.
constexpr std::size_t kBlockElems = 1024;

}  // namespace

OwnerUpdate::OwnerUpdate(const Collective& call, int rank, int world_size)
    : call_(call),
      reduce_op_(reduce_op_of(call)),
      update_op_(make_update_op(call.update->spec, call.dtype)),
      divisor_(divisor_of(call, world_size)),
      own_(ChunkLayout(call.num_elems, world_size).chunk(rank)),
      grad_bytes_(element_bytes(call.dtype)),
      param_bytes_(element_bytes(call.update->spec.param_dtype)),
      block_srcs_(static_cast<std::size_t>(world_size)) {}

void OwnerUpdate::run(const void* const* srcs, int num_srcs, const ElemRange& elems,
                      std::byte* also_to) {
  alignas(64) std::byte reduced[kBlockElems * sizeof(float)];
  for (std::size_t done_elems = 0; done_elems < elems.num_elems; done_elems += kBlockElems) {
    const std::size_t num_elems = std::min(kBlockElems, elems.num_elems - done_elems);
    for (std::size_t s = 0; s < static_cast<std::size_t>(num_srcs); ++s)
      block_srcs_[s] = at(srcs[s], done_elems, grad_bytes_);
    reduce_op_.combine(reduced, nullptr, block_srcs_.data(), num_srcs, num_elems, divisor_);
    UpdateArrays arrays = arrays_at(elems.begin_elems + done_elems);
    arrays.grad = reduced;
    update_op_.apply(update_op_.scalars, arrays, num_elems);
    if (also_to != nullptr)
      std::memcpy(at(also_to, done_elems, param_bytes_), arrays.param, num_elems * param_bytes_);
  }
}

UpdateArrays OwnerUpdate::arrays_at(std::size_t begin_elems) const {
  const std::size_t in_shard = begin_elems - own_.begin_elems;
  const ShardUpdate& shard = *call_.update;
  const auto moved = [in_shard](float* array) {
    return array != nullptr ? array + in_shard : array;
  };
  return {.param = at(call_.outputs[0], begin_elems, param_bytes_),
          .master = moved(shard.master),
          .states = {moved(shard.states[0]), moved(shard.states[1])}};
}

}  // namespace ringcomm
