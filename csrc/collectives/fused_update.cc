#include "collectives/fused_update.h"

#include <algorithm>
#include <cstring>

#include "collectives/call.h"

namespace ringcomm {

// The reduced gradient of one block; with the block's parameters and state it fits an L1 cache of
// 32 KiB.
constexpr std::size_t kBlockElems = 1024;

OwnerUpdate::OwnerUpdate(const Collective& call, int rank, int world_size)
    : call_(call),
      reduce_op_(reduce_op_of(call)),
      update_op_(make_update_op(call.update, call.dtype)),
      divisor_(divisor_of(call, world_size)),
      own_(ChunkLayout(call.num_elems, world_size).chunk(rank)),
      grad_bytes_(element_bytes(call.dtype)),
      param_bytes_(call.output_element_bytes()) {}

void OwnerUpdate::run(const void* const* srcs, int num_srcs, const ElemRange& elems,
                      std::byte* also_to) const {
  std::vector<const void*> block_srcs(static_cast<std::size_t>(num_srcs));
  alignas(64) std::byte reduced[kBlockElems * sizeof(float)];
  for (std::size_t done_elems = 0; done_elems < elems.num_elems; done_elems += kBlockElems) {
    const std::size_t num_elems = std::min(kBlockElems, elems.num_elems - done_elems);
    for (std::size_t s = 0; s < static_cast<std::size_t>(num_srcs); ++s)
      block_srcs[s] = at(srcs[s], done_elems, grad_bytes_);
    reduce_op_.combine(reduced, nullptr, block_srcs.data(), num_srcs, num_elems, divisor_);
    const std::size_t begin_elems = elems.begin_elems + done_elems;
    const auto in_shard = [&](float* array) {
      return array != nullptr ? array + (begin_elems - own_.begin_elems) : array;
    };
    const UpdateArrays arrays{.param = at(call_.outputs[0], begin_elems, param_bytes_),
                              .grad = reduced,
                              .master = in_shard(call_.master),
                              .states = {in_shard(call_.states[0]), in_shard(call_.states[1])}};
    update_op_.apply(update_op_.scalars, arrays, num_elems);
    if (also_to != nullptr)
      std::memcpy(at(also_to, done_elems, param_bytes_), arrays.param, num_elems * param_bytes_);
  }
}

Traffic update_in_parts(const Collective& call, int rank, int world_size,
                        const std::function<Traffic(const Collective&)>& run) {
  Collective summed = call;  // the reduce_scatter averages, not the update
  summed.reduction = Reduction::kSum;
  OwnerUpdate update(summed, rank, world_size);
  std::vector<std::byte> reduced(update.own().num_elems * element_bytes(call.dtype));
  const void* const grad = reduced.data();
  return update_in_parts(
      call, rank, world_size, reduced.data(), [&] { update.run(&grad, 1, update.own(), nullptr); },
      run);
}

Traffic update_in_parts(const Collective& call, int rank, int world_size, void* reduced,
                        const std::function<void()>& update,
                        const std::function<Traffic(const Collective&)>& run) {
  const DType param_dtype = call.update.param_dtype;
  const ChunkLayout layout(call.num_elems, world_size);
  const std::size_t own_elems = layout.chunk(rank).num_elems;
  const auto world = static_cast<std::size_t>(world_size);
  std::vector<const void*> grads(world);
  std::vector<void*> params(world);
  std::vector<std::size_t> chunk_elems(world);
  for (std::size_t peer = 0; peer < world; ++peer) {
    const ElemRange chunk = layout.chunk(static_cast<int>(peer));
    grads[peer] = at(call.inputs[0], chunk.begin_elems, element_bytes(call.dtype));
    params[peer] = at(call.outputs[0], chunk.begin_elems, element_bytes(param_dtype));
    chunk_elems[peer] = chunk.num_elems;
  }

  Collective part = call;
  part.algorithm = Algorithm::kAuto;
  part.num_elems = own_elems;
  part.op = OpKind::kReduceScatter;
  part.inputs = grads.data();
  part.input_elems = chunk_elems.data();
  part.outputs = &reduced;
  Traffic traffic = run(part);

  update();

  part.op = OpKind::kAllGather;
  part.dtype = param_dtype;
  const void* const own_params = params[static_cast<std::size_t>(rank)];
  part.inputs = &own_params;
  part.input_elems = nullptr;
  part.outputs = params.data();
  part.output_elems = chunk_elems.data();
  const Traffic gathered = run(part);
  traffic.sent_bytes += gathered.sent_bytes;
  traffic.copied_bytes += gathered.copied_bytes;
  return traffic;
}

}  // namespace ringcomm
