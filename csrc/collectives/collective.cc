#include "collectives/collective.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace ringcomm {

const char* name_of(OpKind op) {
  switch (op) {
    case OpKind::kBarrier:
      return "barrier";
    case OpKind::kAllReduce:
      return "all_reduce";
    case OpKind::kReduce:
      return "reduce";
    case OpKind::kReduceScatter:
      return "reduce_scatter";
    case OpKind::kAllGather:
      return "all_gather";
    case OpKind::kBroadcast:
      return "broadcast";
    case OpKind::kGather:
      return "gather";
    case OpKind::kScatter:
      return "scatter";
    case OpKind::kAllToAll:
      return "all_to_all";
    case OpKind::kReduceUpdateGather:
      return "reduce_scatter_update_all_gather";
    case OpKind::kSend:
      return "send";
    case OpKind::kRecv:
      return "recv";
  }
  return "unknown op";
}

bool is_reduction(OpKind op) {
  return op == OpKind::kAllReduce || op == OpKind::kReduce || op == OpKind::kReduceScatter ||
         op == OpKind::kReduceUpdateGather;
}

const char* name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kAuto:
      return "auto";
    case Algorithm::kOneShot:
      return "one_shot";
    case Algorithm::kTwoShot:
      return "two_shot";
    case Algorithm::kRing:
      return "ring";
    case Algorithm::kDirect:
      return "direct";
    case Algorithm::kHierarchical:
      return "hierarchical";
  }
  return "unknown algorithm";
}

namespace {

// "auto, one_shot, two_shot and ring"
std::string names_of(std::span<const Algorithm> algorithms) {
  std::string names;
  for (std::size_t idx = 0; idx < algorithms.size(); ++idx) {
    if (idx > 0) names += idx + 1 < algorithms.size() ? ", " : " and ";
    names += name_of(algorithms[idx]);
  }
  return names;
}

}  // namespace

void check_all_reduce_algorithm(Algorithm algorithm, std::span<const Algorithm> known,
                                const std::string& carrier) {
  if (std::find(known.begin(), known.end(), algorithm) != known.end()) return;
  throw std::invalid_argument(std::string(name_of(algorithm)) +
                              " is not an algorithm of all_reduce on this group (" + carrier +
                              "); known are " + names_of(known));
}

Algorithm algorithm_from_name(const std::string& name) {
  for (const Algorithm known : kAllReduceAlgorithms)
    if (name == name_of(known)) return known;
  throw std::invalid_argument("unknown algorithm '" + name + "'; known are " +
                              names_of(kAllReduceAlgorithms));
}

bool Collective::is_uneven(int world_size) const {
  if (input_elems == nullptr && output_elems == nullptr) return false;
  for (int rank = 0; rank < world_size; ++rank)
    if (input_share(rank) != num_elems || output_share(rank) != num_elems) return true;
  return false;
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
  text << name_of(header.op);
  if (header.seq != CallHeader::kNoSeq) text << " #" << header.seq;
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
  if (header.algorithm == Algorithm::kRing)
    text << " with " << header.ring_num_slots << " slots of " << header.ring_slot_bytes << " bytes";
  if (header.update.optimizer != Optimizer::kNone) text << "; " << describe(header.update);
  text << ")";
  return text.str();
}

std::string describe_difference(int peer, const CallHeader& theirs, const std::string& our_op) {
  std::string text = "rank " + std::to_string(peer) + " called " + describe(theirs) + " instead";
  // A rank that has run out of batches makes the next phase's call, often a barrier, where DDP
  // broadcasts buffers or reduces gradients on the others.
  const bool is_phase_start = our_op == name_of(OpKind::kBarrier) ||
                              our_op == name_of(OpKind::kBroadcast) ||
                              theirs.op == OpKind::kBarrier || theirs.op == OpKind::kBroadcast;
  if (is_phase_start && our_op != name_of(theirs.op))
    text += "; did the ranks run different numbers of batches?";
  else if (our_op == name_of(theirs.op))
    text += "; all ranks must pass the same shape, dtype and arguments";
  else
    text += "; all ranks must make the same calls in the same order";
  return text;
}

}  // namespace ringcomm
