#include "transport/shm/transport.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "collectives/algorithm.h"
#include "collectives/op_kind.h"
#include "host/shared_arena.h"

namespace ringcomm {
namespace {

struct Entry {
  OpKind op;
  Algorithm algorithm;
  ShmCollective* run;
  ShmCollective* run_shared = nullptr;  // on the ranks' own buffers
};
constexpr Entry kCollectives[] = {
    {OpKind::kBarrier, Algorithm::kDirect, barrier},
    {OpKind::kAllReduce, Algorithm::kOneShot, all_reduce_one_shot, all_reduce_shared},
    {OpKind::kAllReduce, Algorithm::kTwoShot, run_two_shot, all_reduce_shared},
    {OpKind::kAllReduce, Algorithm::kRing, run_ring},
    {OpKind::kReduce, Algorithm::kDirect, reduce},
    {OpKind::kReduceScatter, Algorithm::kDirect, reduce_scatter, reduce_scatter},
    {OpKind::kAllGather, Algorithm::kDirect, all_gather, all_gather},
    {OpKind::kBroadcast, Algorithm::kDirect, broadcast, broadcast},
    {OpKind::kGather, Algorithm::kDirect, alltoallv},
    {OpKind::kScatter, Algorithm::kDirect, alltoallv},
    {OpKind::kAllToAll, Algorithm::kDirect, alltoallv},
    {OpKind::kReduceUpdateGather, Algorithm::kDirect, run_two_shot},
    {OpKind::kReduceUpdateGather, Algorithm::kRing, run_ring},
};

const Entry& entry_of(const CallHeader& header) {
  const Entry* found = std::ranges::find_if(kCollectives, [&](const Entry& entry) {
    return entry.op == header.op && entry.algorithm == header.algorithm;
  });
  if (found == std::end(kCollectives))
    throw std::invalid_argument(std::string(name_of(header.algorithm)) +
                                " is not an algorithm of " + name_of(header.op) +
                                " over shared memory");
  return *found;
}

// The bytes of a shard; of uneven ones the average of those that this rank sends or receives.
std::size_t shard_bytes(const Collective& call, const CallHeader& header, int world_size) {
  if (!header.is_uneven) return call.num_bytes();
  std::size_t most_elems = 0;
  for (const std::size_t* elems : {call.input_elems, call.output_elems})
    if (elems != nullptr)
      most_elems = std::max(most_elems, std::accumulate(elems, elems + world_size, std::size_t{0}));
  return most_elems / static_cast<std::size_t>(world_size) * element_bytes(call.dtype);
}

// How many buffers of the call's size a rank has.
std::size_t num_buffers(OpKind op, int world_size) {
  const bool is_one = op == OpKind::kAllReduce || op == OpKind::kReduce ||
                      op == OpKind::kBroadcast || op == OpKind::kReduceUpdateGather;
  return is_one ? 1 : static_cast<std::size_t>(world_size);
}

// The bytes that a handle of the input describes.
std::size_t input_bytes(const Collective& call, int world_size) {
  const bool has_shards = call.op == OpKind::kReduceScatter;
  return (has_shards ? static_cast<std::size_t>(world_size) : 1) * call.num_bytes();
}

// Whether the shards of an array of buffers are contiguous, so that one location describes all.
bool is_contiguous(const void* const* buffers, int num_buffers, std::size_t num_bytes) {
  for (int i = 1; i < num_buffers; ++i)
    if (buffers[i] != at(buffers[0], static_cast<std::size_t>(i), num_bytes)) return false;
  return true;
}

}  // namespace

// A call on shared buffers has one synchronization more than staging, whose cost grows with the
// ranks per core, and moves at most half of the bytes (docs/experiments.md, "shared buffers"). In a
// broadcast the other ranks learn of the root's buffer after they have begun to stage.
std::size_t min_direct_bytes(OpKind op, int world_size) {
  if (op == OpKind::kBroadcast) return std::size_t{128} << 10;
  return std::size_t{world_size <= 2 ? 8U : 64U} << 10;
}

ShmTransport::ShmTransport(host::Rendezvous& rendezvous, const PeerTable& peer_table, int rank,
                           const CommunicatorOptions& options)
    : options_(options),
      group_(rendezvous, peer_table.ranks_on(peer_table.host_of(rank)), {}),
      scope_(group_),
      context_(group_, scope_, options.max_threads) {}

void ShmTransport::plan(const Collective& call, CallHeader& header) const {
  Algorithm asked = call.algorithm != Algorithm::kAuto ? call.algorithm : options_.algorithm;
  // The ring does not reduce in rank order; two_shot does.
  if (asked == Algorithm::kRing && options_.is_rank_ordered) asked = Algorithm::kTwoShot;
  const bool is_fused_ring = call.op == OpKind::kReduceUpdateGather && asked == Algorithm::kRing;
  header.algorithm = is_fused_ring ? asked : Algorithm::kDirect;
  if (call.op == OpKind::kAllReduce)
    header.algorithm =
        asked != Algorithm::kAuto
            ? asked
            : choose_all_reduce(call.num_bytes(), group_.world_size(), options_.one_shot_max_bytes);
}

Traffic ShmTransport::run(const Collective& call, const CallHeader& header,
                          const WaitLimits& limits) {
  if (const int gone = group_.gone_before(header.seq); gone >= 0)
    throw Stopped{group_.state_of(gone), gone};
  group_.record_call(header.seq);
  scope_.begin(limits);
  const std::size_t num_bytes = shard_bytes(call, header, group_.world_size());
  context_.store_kinds().begin(call.op, num_bytes);
  context_.workers().begin(num_bytes * num_buffers(call.op, group_.world_size()));
  context_.take_copied_bytes();  // of a call that failed
  try {
    Traffic traffic = run_or_share(call, header);
    group_.record_end();
    context_.workers().end();
    traffic.copied_bytes = context_.take_copied_bytes();
    return traffic;
  } catch (const Mismatched& mismatched) {
    // The headers do not show the sizes of a peer whose shards are uneven.
    if (is_same_call(header, mismatched.theirs) && !header.is_uneven && mismatched.theirs.is_uneven)
      explain_mismatch(context_, call);
    throw;
  }
}

// The handle of this rank's buffers, if they are shared and the call may run on them.
BufferHandle ShmTransport::handle_of(const Collective& call) const {
  const host::SharedArena* arena = host::SharedArena::find();
  const int world_size = group_.world_size();
  const std::size_t num_bytes = call.num_bytes();
  if (arena == nullptr || num_bytes < min_direct_bytes(call.op, world_size) ||
      call.is_uneven(world_size))
    return {};
  const bool is_all_reduce = call.op == OpKind::kAllReduce;
  const bool has_choice =
      call.algorithm == Algorithm::kAuto && options_.algorithm == Algorithm::kAuto;
  if ((is_all_reduce && !has_choice) ||
      (call.op == OpKind::kBroadcast && group_.rank() != call.root) ||
      (call.op == OpKind::kReduceScatter && !is_contiguous(call.inputs, world_size, num_bytes)))
    return {};
  BufferHandle handle{.input = arena->locate(call.inputs[0], input_bytes(call, world_size))};
  if (is_all_reduce) handle.output = arena->locate(call.outputs[0], num_bytes);
  return is_all_reduce && !handle.output.is_somewhere() ? BufferHandle{} : handle;
}

// In the first phase a rank with shared buffers publishes a handle in place of data, so all ranks
// make the same decision (docs/design/shared_buffers.md, "How ranks agree").
Traffic ShmTransport::run_or_share(const Collective& call, const CallHeader& header) {
  const Entry& entry = entry_of(header);
  const auto staged = [&](std::uint64_t sent_bytes) {
    context_.store_kinds().end();
    return Traffic{.sent_bytes = sent_bytes, .algorithm = header.algorithm};
  };
  const BufferHandle mine = entry.run_shared != nullptr ? handle_of(call) : BufferHandle{};
  context_.begin(header, mine);
  if (!mine.is_given()) {
    const std::uint64_t sent_bytes = entry.run(context_, call);
    if (!context_.has_handles()) return staged(sent_bytes);
  }
  try {
    if (mine.is_given()) static_cast<void>(context_.publish());
    if (context_.has_all_handles(call.op == OpKind::kBroadcast ? call.root : -1)) {
      context_.step() = {};  // of what was staged in vain
      context_.share_inputs(input_bytes(call, group_.world_size()));
      return {.sent_bytes = entry.run_shared(context_, call), .algorithm = Algorithm::kDirect};
    }
  } catch (...) {
    // A peer without an error may have started, and be in the blocks until it leaves the group.
    if (mine.is_given())
      for (const host::ArenaLocation& location : {mine.input, mine.output})
        host::SharedArena::instance().hold(location, group_.left_by_all());
    throw;
  }
  return staged(entry.run(context_, call));
}

}  // namespace ringcomm
