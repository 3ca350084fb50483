#include "collectives/call_header.h"

#include <functional>
#include <sstream>
#include <string_view>

namespace ringcomm {

CallHeader header_of(const Collective& call, std::uint64_t seq, int world_size) {
  return {.seq = seq,
          .num_elems = call.num_elems,
          .root = call.root,
          .op = call.op,
          .dtype = call.dtype,
          .reduction = call.reduction,
          .algorithm = Algorithm::kDirect,
          .is_uneven = call.is_uneven(world_size),
          .has_update = call.update != nullptr,
          .element_name = call.element_name,
          .update = call.update != nullptr ? call.update->spec : UpdateSpec{}};
}

CallHeader without_sizes(CallHeader header) {
  header.num_elems = 0;
  header.is_uneven = false;
  return header;
}

bool is_same_call(const CallHeader& a, const CallHeader& b) {
  return without_sizes(a) == without_sizes(b);
}

CallHeader with_digest_of_shards(CallHeader header, const Collective& call, int world_size) {
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

}  // namespace ringcomm
