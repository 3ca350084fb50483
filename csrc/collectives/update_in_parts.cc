#include "collectives/update_in_parts.h"

#include <cstddef>
#include <vector>

#include "collectives/owner_update.h"
#include "collectives/reduction.h"
#include "core/chunk_layout.h"

namespace ringcomm {

Traffic update_in_parts(const Collective& call, int rank, int world_size,
                        const std::function<Traffic(const Collective&)>& run) {
  Collective summed = call;  // the reduce_scatter averages, not the update
  summed.reduction = Reduction::kSum;
  OwnerUpdate update(summed, rank, world_size);
  const ChunkLayout layout(call.num_elems, world_size);
  const auto world = static_cast<std::size_t>(world_size);
  std::vector<const void*> grads(world);
  std::vector<void*> params(world);
  std::vector<std::size_t> chunk_elems(world);
  for (std::size_t peer = 0; peer < world; ++peer) {
    const ElemRange chunk = layout.chunk(static_cast<int>(peer));
    grads[peer] = at(call.inputs[0], chunk.begin_elems, update.grad_bytes());
    params[peer] = at(call.outputs[0], chunk.begin_elems, update.param_bytes());
    chunk_elems[peer] = chunk.num_elems;
  }

  std::vector<std::byte> reduced(update.own().num_elems * update.grad_bytes());
  void* const output = reduced.data();
  Collective scatter = call;
  scatter.op = OpKind::kReduceScatter;
  scatter.algorithm = Algorithm::kAuto;
  scatter.num_elems = update.own().num_elems;
  scatter.inputs = grads.data();
  scatter.input_elems = chunk_elems.data();
  scatter.outputs = &output;
  Traffic traffic = run(scatter);

  const void* const grad = reduced.data();
  update.run(&grad, 1, update.own(), nullptr);

  Collective gather = call;
  gather.op = OpKind::kAllGather;
  gather.algorithm = Algorithm::kAuto;
  gather.dtype = call.update->spec.param_dtype;
  gather.num_elems = update.own().num_elems;
  const void* const own_params = params[static_cast<std::size_t>(rank)];
  gather.inputs = &own_params;
  gather.outputs = params.data();
  gather.output_elems = chunk_elems.data();
  const Traffic gathered = run(gather);
  traffic.sent_bytes += gathered.sent_bytes;
  traffic.copied_bytes += gathered.copied_bytes;
  return traffic;
}

}  // namespace ringcomm
