#include "collectives/collective.h"

#include <algorithm>
#include <vector>

namespace ringcomm {

bool Collective::is_uneven(int world_size) const {
  if (input_elems == nullptr && output_elems == nullptr) return false;
  for (int rank = 0; rank < world_size; ++rank)
    if (input_shard(rank) != num_elems || output_shard(rank) != num_elems) return true;
  return false;
}

void check_overlap(const Collective& call, int rank, int world_size) {
  if (call.inputs == nullptr || call.outputs == nullptr) return;  // a rank that has only one side
  const auto num_buffers = [&](OpKind op, OpKind at_root) {
    if (call.op == at_root) return rank == call.root ? world_size : 0;
    return call.op == op || call.op == OpKind::kAllToAll ? world_size : 1;
  };
  const int num_inputs = num_buffers(OpKind::kReduceScatter, OpKind::kScatter);
  const int num_outputs = num_buffers(OpKind::kAllGather, OpKind::kGather);
  const std::size_t input_bytes = element_bytes(call.dtype);
  const std::size_t output_bytes =
      call.update != nullptr ? element_bytes(call.update->spec.param_dtype) : input_bytes;
  const auto end_of_input = [&](int idx) {
    return at(call.inputs[idx], call.input_shard(idx), input_bytes);
  };
  const auto end_of_output = [&](int idx) -> const std::byte* {
    return at(call.outputs[idx], call.output_shard(idx), output_bytes);
  };
  const auto check = [&](int in, int out) {
    const bool is_in_place = call.inputs[in] == call.outputs[out] &&
                             (num_inputs > 1 ? in : rank) == (num_outputs > 1 ? out : rank);
    const void* const begin = std::max<const void*>(call.inputs[in], call.outputs[out]);
    if (is_in_place || begin >= std::min(end_of_input(in), end_of_output(out))) return;
    const auto name = [](int num, const char* what, const char* of, int idx) {
      return num == 1 ? std::string("its ") + what
                      : std::string("the ") + what + of + std::to_string(idx);
    };
    throw std::invalid_argument(
        std::string(name_of(call.op)) + ": " + name(num_inputs, "input", " for rank ", in) +
        " and " + name(num_outputs, "output", " of rank ", out) +
        " share memory, but the call is not exactly in place; pass a clone()");
  };
  if (num_inputs <= 1 || num_outputs <= 1) {
    for (int in = 0; in < num_inputs; ++in)
      for (int out = 0; out < num_outputs; ++out) check(in, out);
    return;
  }
  // As a rule all outputs are behind all inputs, or before them.
  const auto begin_of = [](const auto* buffers, int num) {
    return static_cast<const std::byte*>(*std::min_element(buffers, buffers + num));
  };
  const auto end_of = [](int num, const auto& end_of_one) {
    const std::byte* end = end_of_one(0);
    for (int idx = 1; idx < num; ++idx) end = std::max(end, end_of_one(idx));
    return end;
  };
  if (end_of(num_inputs, end_of_input) <= begin_of(call.outputs, num_outputs) ||
      end_of(num_outputs, end_of_output) <= begin_of(call.inputs, num_inputs))
    return;
  std::vector<int> outputs;  // disjoint, in the order of memory
  for (int out = 0; out < num_outputs; ++out)
    if (call.output_shard(out) > 0) outputs.push_back(out);
  std::ranges::sort(outputs, {}, end_of_output);
  for (int in = 0; in < num_inputs; ++in) {
    const auto* begin = static_cast<const std::byte*>(call.inputs[in]);
    auto out = std::ranges::upper_bound(outputs, begin, {}, end_of_output);
    for (; out != outputs.end() && call.outputs[*out] < end_of_input(in); ++out) check(in, *out);
  }
}

std::optional<CallPart> part_given(const Collective& call, int rank, int to) {
  const bool has_shards = call.op == OpKind::kReduceScatter || call.op == OpKind::kAllToAll ||
                          (call.op == OpKind::kScatter && rank == call.root);
  if (has_shards) return CallPart{const_cast<void*>(call.inputs[to]), call.input_shard(to)};
  if (call.op == OpKind::kAllGather || (call.op == OpKind::kGather && to == call.root))
    return CallPart{const_cast<void*>(call.inputs[0]), call.num_elems};
  return std::nullopt;
}

std::optional<CallPart> part_taken(const Collective& call, int rank, int from) {
  const bool has_shards = call.op == OpKind::kAllGather || call.op == OpKind::kAllToAll ||
                          (call.op == OpKind::kGather && rank == call.root);
  if (has_shards) return CallPart{call.outputs[from], call.output_shard(from)};
  if (call.op == OpKind::kReduceScatter || (call.op == OpKind::kScatter && from == call.root))
    return CallPart{call.outputs[0], call.num_elems};
  return std::nullopt;
}

}  // namespace ringcomm
