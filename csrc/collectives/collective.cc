#include "collectives/collective.h"

#include <sstream>

namespace ringcomm {

namespace {

constexpr std::array<const char*, kNumOpKinds> kOpNames = {
    "barrier",   "all_reduce", "reduce",  "reduce_scatter", "all_gather",
    "broadcast", "gather",     "scatter", "all_to_all",     "reduce_scatter_update_all_gather",
    "send",      "recv"};
constexpr std::array<const char*, kNumAlgorithms> kAlgorithmNames = {
    "auto", "one_shot", "two_shot", "ring", "direct", "hierarchical"};

}  // namespace

// A peer's header may hold any number.
const char* name_of(OpKind op) {
  const auto idx = static_cast<std::size_t>(op);
  return idx < kOpNames.size() ? kOpNames[idx] : "unknown op";
}

const char* name_of(Algorithm algorithm) {
  const auto idx = static_cast<std::size_t>(algorithm);
  return idx < kAlgorithmNames.size() ? kAlgorithmNames[idx] : "unknown algorithm";
}

bool is_reduction(OpKind op) {
  return op == OpKind::kAllReduce || op == OpKind::kReduce || op == OpKind::kReduceScatter ||
         op == OpKind::kReduceUpdateGather;
}

Algorithm algorithm_from_name(const std::string& name) {
  for (const Algorithm known :
       {Algorithm::kAuto, Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kRing})
    if (name == name_of(known)) return known;
  throw std::invalid_argument("unknown algorithm '" + name +
                              "'; known are auto, one_shot, two_shot and ring");
}

std::string CommunicatorOptions::to_text() const {
  std::ostringstream text;
  text << "algorithm=" << name_of(algorithm)
       << " deterministic=" << (is_rank_ordered ? "rank_order" : "none")
       << " one_shot_max_bytes=" << one_shot_max_bytes
       << " transport=" << (transport.empty() ? "auto" : transport);
  if (!p2p_backend.empty()) text << " p2p_backend=" << p2p_backend;
  return text.str();
}

bool Collective::is_uneven(int world_size) const {
  if (input_elems == nullptr && output_elems == nullptr) return false;
  for (int rank = 0; rank < world_size; ++rank)
    if (input_share(rank) != num_elems || output_share(rank) != num_elems) return true;
  return false;
}

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

bool is_same_call(CallHeader a, CallHeader b) {
  a.num_elems = b.num_elems = 0;
  a.is_uneven = b.is_uneven = false;
  return a == b;
}

bool has_private_sizes(OpKind op) {
  return op == OpKind::kGather || op == OpKind::kScatter || op == OpKind::kAllToAll;
}

std::string describe(const CallHeader& header) {
  std::ostringstream text;
  text << name_of(header.op) << " #" << header.seq;
  if (header.op == OpKind::kBarrier) return text.str();
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
