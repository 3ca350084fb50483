#include "cuda/collectives/in_place.h"

#include <algorithm>

#include "core/chunk_layout.h"

namespace ringcomm::cuda {

InPlaceLaunch::InPlaceLaunch(const Collective& call, const LaunchPlan& plan,
                             KernelCall& kernel_call)
    : plan_(plan),
      call_(kernel_call),
      lends_inputs_(!writes_inputs(call, kernel_call)),
      buffers_(2 * static_cast<std::size_t>(kernel_call.world_size)) {
  call_.piece_size = plan.piece_size;
  if (plan.kind == LaunchKind::kRing) return;
  for (std::size_t rank = 0; rank < num_parts(); ++rank) {
    if (static_cast<int>(rank) != call_.rank)  // its own input a rank reads where it is
      buffers_[rank] = {call_.inputs[rank], call_.input_bytes[rank]};
    if (call_.num_outputs > 1)
      buffers_[num_parts() + rank] = {call_.outputs[rank], call_.output_bytes[rank]};
  }
}

bool InPlaceLaunch::is_staged(std::size_t first) const {
  const bool can_lend = first != 0 || lends_inputs_;
  const auto begin = buffers_.begin() + static_cast<std::ptrdiff_t>(first);
  return std::any_of(begin, begin + static_cast<std::ptrdiff_t>(num_parts()),
                     [&](const PeerBuffer& buffer) {
                       return buffer.num_bytes > 0 && (buffer.place == 0 || !can_lend);
                     });
}

Place InPlaceLaunch::place_of(std::size_t idx, bool is_staged, std::uint64_t in_scratch,
                              std::size_t unit) const {
  const std::uint64_t begin = call_.piece_begin * unit;
  if (buffers_[idx].num_bytes <= begin) return 0;
  return is_staged ? place_in_scratch(in_scratch) : buffers_[idx].place + begin;
}

void InPlaceLaunch::run(const Launch& launch) {
  using enum Step;
  const bool stages_inputs = call_.stages_inputs = is_staged(0);
  const bool stages_outputs = call_.stages_outputs = is_staged(num_parts());
  for (unsigned piece = 0; piece < plan_.num_pieces; ++piece) {
    call_.piece_begin = piece * plan_.piece_size;
    for (std::size_t rank = 0; rank < num_parts(); ++rank) {
      call_.input_places[rank] =
          place_of(rank, stages_inputs, rank * plan_.input_stride, call_.input_unit);
      call_.output_places[rank] =
          place_of(num_parts() + rank, stages_outputs,
                   plan_.outputs_offset + rank * plan_.output_stride, call_.output_unit);
    }
    if (is_staged()) launch(kCopyIn, call_);
    for (const Step step : {kOpen, kBody, kClose}) launch(step, call_);
    if (stages_outputs) launch(kCopyOut, call_);
  }
}

}  // namespace ringcomm::cuda
