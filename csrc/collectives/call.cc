#include "collectives/call.h"

#include <algorithm>
#include <functional>
#include <sstream>
#include <string_view>
#include <vector>

namespace ringcomm {

Algorithm algorithm_from_name(const std::string& name) {
  for (int i = 0; i < 4; ++i)
    if (name == kAlgorithmNames[i]) return static_cast<Algorithm>(i);
  throw std::invalid_argument("unknown algorithm '" + name +
                              "'; known are auto, one_shot, two_shot and ring");
}

bool Collective::has_uneven_shards(int world_size) const {
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
  const std::size_t output_bytes = call.output_element_bytes();
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
  // As a rule all outputs are behind all inputs, or before them.
  const auto begin_of = [](const auto* buffers, int num) {
    return static_cast<const std::byte*>(*std::min_element(buffers, buffers + num));
  };
  const auto end_of = [](int num, const auto& end_of_one) {
    const std::byte* end = end_of_one(0);
    for (int idx = 1; idx < num; ++idx) end = std::max(end, end_of_one(idx));
    return end;
  };
  if (num_inputs > 1 && num_outputs > 1 &&
      (end_of(num_inputs, end_of_input) <= begin_of(call.outputs, num_outputs) ||
       end_of(num_outputs, end_of_output) <= begin_of(call.inputs, num_inputs)))
    return;
  for (int in = 0; in < num_inputs; ++in)
    for (int out = 0; out < num_outputs; ++out) check(in, out);
}

std::optional<CallPart> part_given(const Collective& call, int rank, int to) {
  const bool gives_shards = call.op == OpKind::kReduceScatter || call.op == OpKind::kAllToAll ||
                            (call.op == OpKind::kScatter && rank == call.root);
  if (gives_shards) return CallPart{const_cast<void*>(call.inputs[to]), call.input_shard(to)};
  if (call.op == OpKind::kAllGather || (call.op == OpKind::kGather && to == call.root))
    return CallPart{const_cast<void*>(call.inputs[0]), call.num_elems};
  return std::nullopt;
}

std::optional<CallPart> part_taken(const Collective& call, int rank, int from) {
  const bool takes_shards = call.op == OpKind::kAllGather || call.op == OpKind::kAllToAll ||
                            (call.op == OpKind::kGather && rank == call.root);
  if (takes_shards) return CallPart{call.outputs[from], call.output_shard(from)};
  if (call.op == OpKind::kReduceScatter || (call.op == OpKind::kScatter && from == call.root))
    return CallPart{call.outputs[0], call.num_elems};
  return std::nullopt;
}

// ---- headers of two ranks

CallHeader without_sizes(CallHeader header) {
  header.num_elems = 0;
  header.is_uneven = false;
  return header;
}

bool is_same_call(const CallHeader& a, const CallHeader& b) {
  return without_sizes(a) == without_sizes(b);
}

CallHeader with_digest_of_shards(const Collective& call, int world_size) {
  CallHeader header = call;
  if (!header.is_uneven || has_private_sizes(call.op)) return header;
  const auto* const elems =
      call.op == OpKind::kReduceScatter ? call.input_elems : call.output_elems;
  const std::size_t num_bytes = static_cast<std::size_t>(world_size) * sizeof(*elems);
  header.num_elems =
      std::hash<std::string_view>()({reinterpret_cast<const char*>(elems), num_bytes});
  return header;
}

std::uint32_t digest_of(CallHeader header) {
  if (has_private_sizes(header.op)) header = without_sizes(header);
  const auto* const bytes = reinterpret_cast<const char*>(&header);
  const std::string_view call(bytes, offsetof(CallHeader, element_name) + sizeof(ElementName));
  const std::string_view update(reinterpret_cast<const char*>(&header.update), sizeof(UpdateSpec));
  const std::hash<std::string_view> digest;
  return static_cast<std::uint32_t>(digest(call) * 31 + digest(update));
}

std::string describe(const CallHeader& header) {
  std::ostringstream text;
  text << name_of(header.op) << " #" << header.seq;
  if (header.op == OpKind::kBarrier || header.whole != 0) return text.str();
  text << " (";
  if (is_reduction(header.op)) text << name_of(header.reduction) << ", ";
  if (header.dtype != DType::kByte) text << name_of(header.dtype) << ", ";
  if (header.element_name[0] != '\0') text << header.element_name.data() << ", ";
  if (header.is_uneven)
    text << "uneven";
  else
    text << header.num_elems * element_bytes(header.dtype) << " bytes";
  if (header.root >= 0) text << ", root " << header.root;
  if (header.algorithm != Algorithm::kAuto && header.algorithm != Algorithm::kDirect)
    text << ", " << name_of(header.algorithm);
  if (header.update.optimizer != Optimizer::kNone) text << "; " << describe(header.update);
  text << ")";
  return text.str();
}

std::string size_difference(int from, std::uint64_t has_bytes, int to,
                            std::uint64_t expects_bytes) {
  return "rank " + std::to_string(from) + " has " + std::to_string(has_bytes) + " bytes for rank " +
         std::to_string(to) + ", which expects " + std::to_string(expects_bytes) + " bytes";
}

std::string describe_difference(int peer, const CallHeader& theirs, const std::string& our_op) {
  const std::string text =
      "rank " + std::to_string(peer) + " called " + describe(theirs) + " instead; ";
  if (our_op == name_of(theirs.op))
    return text + "all ranks must pass the same shape, dtype and arguments";
  // A rank that has run out of batches makes the next phase's call, often a barrier, where DDP
  // broadcasts buffers or reduces gradients on the others.
  for (const OpKind op : {OpKind::kBarrier, OpKind::kBroadcast})
    if (theirs.op == op || our_op == name_of(op))
      return text + "did the ranks run different numbers of batches?";
  return text + "all ranks must make the same calls in the same order";
}

std::string CommunicatorOptions::to_text() const {
  std::ostringstream text;
  text << "algorithm=" << name_of(algorithm)
       << " deterministic=" << (is_rank_ordered ? "rank_order" : "none")
       << " one_shot_max_bytes=" << one_shot_max_bytes
       << " transport=" << (transport.empty() ? "auto" : transport);
  if (!message_backend.empty()) text << " message_backend=" << message_backend;
  return text.str();
}

}  // namespace ringcomm
