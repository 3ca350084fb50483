#include "cuda/collectives/lent_buffers.h"

#include <algorithm>
#include <iterator>

#include "collectives/collective.h"

namespace ringcomm::cuda {
namespace {

struct Buffer {
  const std::byte* data;
  std::size_t num_bytes;
};

bool overlap(const Buffer& a, const Buffer& b) {
  return a.num_bytes > 0 && b.num_bytes > 0 && a.data < b.data + b.num_bytes &&
         b.data < a.data + a.num_bytes;
}

// Whether peers write this rank's output.
bool gathers(OpKind op) { return op == OpKind::kAllReduce || op == OpKind::kReduceUpdateGather; }

// This rank's input for `rank`, at the address where that rank reads it.
Buffer input_for(const Collective& call, const KernelCall& kernel_call, int rank) {
  const bool is_one = gathers(call.op) || call.op == OpKind::kReduce;
  if (call.op == OpKind::kReduce && rank != call.root) return {nullptr, 0};
  const int idx = is_one ? 0 : rank;
  return {kernel_call.inputs[idx], kernel_call.input_bytes[idx]};
}

// Whether this rank's kernel writes to a buffer that a peer reads. Its own share of a move may be
// in place, because it is not copied.
bool is_written(const Collective& call, const KernelCall& kernel_call, const Buffer& input) {
  const int own = kernel_call.rank;
  if (gathers(call.op)) return false;
  if (is_reduction(call.op)) {
    const bool has_output = call.op == OpKind::kReduceScatter;
    return has_output && overlap(input, {kernel_call.outputs[0], kernel_call.input_bytes[own]});
  }
  for (int rank = 0; rank < kernel_call.world_size; ++rank) {
    const Buffer output{kernel_call.outputs[rank], kernel_call.output_bytes[rank]};
    if (rank == own && output.data == kernel_call.inputs[own]) continue;
    if (overlap(input, output)) return true;
  }
  return false;
}

// Whether no block has a second slice. For moves with different sizes a single rank cannot know
// that.
bool is_short(const Collective& call, const LaunchPlan& plan, const KernelCall& kernel_call) {
  return !gathers(call.op) && kernel_call.num_slices > 0 &&
         kernel_call.num_slices <= plan.num_blocks;
}

std::size_t output_bytes(const Collective& call) {
  const DType dtype = call.update != nullptr ? call.update->spec.param_dtype : call.dtype;
  return call.num_elems * element_bytes(dtype);
}

}  // namespace

void find_lent_buffers(const Collective& call, const LaunchPlan& plan, const PlaceOf& place_of,
                       KernelCall& kernel_call) {
  std::fill(std::begin(kernel_call.lent_inputs), std::end(kernel_call.lent_inputs), 0);
  kernel_call.lent_output = 0;
  kernel_call.lends = Lends::kNo;
  if (is_short(call, plan, kernel_call)) return;
  bool has_any = false;
  Buffer last{nullptr, 0};
  std::uint64_t place = 0;
  for (int rank = 0; rank < kernel_call.world_size; ++rank) {
    const Buffer input = input_for(call, kernel_call, rank);
    if (rank == kernel_call.rank || input.num_bytes == 0) continue;
    // Mostly it has the same for all.
    if (input.data != last.data || input.num_bytes != last.num_bytes) {
      place = is_written(call, kernel_call, input) ? 0 : place_of(input.data, input.num_bytes);
      last = input;
    }
    if (place == 0) return;
    kernel_call.lent_inputs[rank] = place;
    has_any = true;
  }
  if (has_any && gathers(call.op)) {
    kernel_call.lent_output = place_of(kernel_call.outputs[0], output_bytes(call));
    if (kernel_call.lent_output == 0) return;
  }
  kernel_call.lends = has_any ? Lends::kYes : Lends::kNothing;
}

}  // namespace ringcomm::cuda
