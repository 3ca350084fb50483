#include "transport/shm/context.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>

#include "collectives/call.h"
#include "core/errors.h"
#include "host/bootstrap.h"

namespace ringcomm {
namespace {

struct Entry {
  OpKind op;
  Algorithm algorithm;
  ShmCollective* run;
  ShmCollective* run_zero_copy = nullptr;  // on the ranks' own buffers
};
constexpr Entry kCollectives[] = {
    {OpKind::kBarrier, Algorithm::kDirect, barrier},
    {OpKind::kAllReduce, Algorithm::kOneShot, all_reduce_one_shot, all_reduce_zero_copy},
    {OpKind::kAllReduce, Algorithm::kTwoShot, run_two_shot, all_reduce_zero_copy},
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

const Entry& entry_of(const CallHeader& call) {
  const Entry* found = std::ranges::find_if(kCollectives, [&](const Entry& entry) {
    return entry.op == call.op && entry.algorithm == call.algorithm;
  });
  if (found == std::end(kCollectives))
    throw std::invalid_argument(std::string(name_of(call.algorithm)) + " is not an algorithm of " +
                                name_of(call.op) + " over shared memory");
  return *found;
}

// The bytes of a shard; of uneven ones the average of those that this rank sends or receives.
std::size_t shard_bytes(const Collective& call, int world_size) {
  if (!call.is_uneven) return call.num_bytes();
  std::size_t most_elems = 0;
  for (const std::size_t* elems : {call.input_elems, call.output_elems})
    if (elems != nullptr)
      most_elems = std::max(most_elems, std::accumulate(elems, elems + world_size, std::size_t{0}));
  return most_elems / static_cast<std::size_t>(world_size) * element_bytes(call.dtype);
}

// The bytes that a handle of the input describes.
std::size_t input_bytes(const Collective& call, int world_size) {
  const int num_shards = call.op == OpKind::kReduceScatter ? world_size : 1;
  return static_cast<std::size_t>(num_shards) * call.num_bytes();
}

// Whether the shards of an array of buffers are contiguous, so that one location describes all.
bool is_contiguous(const void* const* buffers, int num_buffers, std::size_t num_bytes) {
  for (int i = 1; i < num_buffers; ++i)
    if (buffers[i] != at(buffers[0], static_cast<std::size_t>(i), num_bytes)) return false;
  return true;
}

}  // namespace

// A call on shared buffers has one synchronization more than staging, whose cost grows with the
// ranks per core, and moves at most half of the bytes (docs/decisions.md). In a
// broadcast the other ranks learn of the root's buffer after they have begun to stage.
std::size_t min_zero_copy_bytes(OpKind op, int world_size) {
  if (op == OpKind::kBroadcast) return std::size_t{128} << 10;
  return std::size_t{world_size <= 2 ? 8U : 64U} << 10;
}

ShmTransport::ShmTransport(host::Rendezvous& rendezvous, const PeerTable& peer_table, int rank,
                           const CommunicatorOptions& options)
    : options_(options),
      group_(rendezvous, peer_table.ranks_on(peer_table.host_of(rank)), {}),
      guard_(group_),
      context_(group_, guard_, options) {}

void ShmTransport::plan(Collective& call) const {
  if (call.algorithm == Algorithm::kAuto) call.algorithm = options_.algorithm;
  call.is_requested = call.algorithm != Algorithm::kAuto;
  // The ring does not reduce in rank order; two_shot does.
  if (call.algorithm == Algorithm::kRing && options_.is_rank_ordered)
    call.algorithm = Algorithm::kTwoShot;
  if (call.op == OpKind::kAllReduce) {
    if (!call.is_requested)
      call.algorithm = context_.staging().algorithm_of(call.num_bytes(), element_bytes(call.dtype));
  } else if (call.op != OpKind::kReduceUpdateGather || call.algorithm != Algorithm::kRing) {
    call.algorithm = Algorithm::kDirect;
  }
}

Traffic ShmTransport::run(const Collective& call, const WaitLimits& limits) {
  if (const int gone = group_.gone_before(call.seq); gone >= 0)
    // Not while a rank writes why it ends the group: the call's first wait has that reason.
    if (const WaitStatus state = group_.state_of(gone); state != WaitStatus::kNone)
      throw WaitFailed{state, gone};
  // Of a call over several hosts, only the first part is an arrival.
  guard_.set_arriving(group_.record_call(call.seq));
  guard_.begin(limits);
  const std::size_t num_bytes = shard_bytes(call, group_.world_size());
  const bool is_chosen = call.op == OpKind::kAllReduce && !call.is_requested;
  context_.staging().begin(call.op, num_bytes, is_chosen ? element_bytes(call.dtype) : 0);
  const int num_buffers = has_shards(call.op) ? group_.world_size() : 1;
  context_.thread_pool().begin(num_bytes * static_cast<std::size_t>(num_buffers));
  context_.take_copied_bytes();  // of a call that failed
  const Entry& entry = entry_of(call);
  const BufferHandle mine = entry.run_zero_copy != nullptr ? handle_of(call) : BufferHandle{};
  Traffic traffic{.algorithm = call.algorithm};
  try {
    context_.begin(call, mine);
    // Where no rank has a handle, this is all. Where a peer has one, publish() returns false in the
    // first phase, and this ends without a result.
    if (!mine.is_given()) traffic.sent_bytes = entry.run(context_, call);
    bool is_staged = !mine.is_given() && !context_.has_handles();
    if (!is_staged && !run_zero_copy(*entry.run_zero_copy, call, mine, traffic)) {
      traffic.sent_bytes = entry.run(context_, call);
      is_staged = true;
    }
    if (is_staged) context_.staging().end();
    group_.record_end();
    context_.thread_pool().end();
    traffic.copied_bytes = context_.take_copied_bytes();
    return traffic;
  } catch (const Mismatched& mismatched) {
    // The headers do not show the sizes of a peer whose shards are uneven.
    if (is_same_call(call, mismatched.theirs) && !call.is_uneven && mismatched.theirs.is_uneven)
      explain_mismatch(context_, call);
    throw;
  }
}

// The handle of this rank's buffers, if they are shared and the call may run on them.
BufferHandle ShmTransport::handle_of(const Collective& call) const {
  const host::SharedArena* arena = host::SharedArena::find();
  const int world_size = group_.world_size();
  const std::size_t num_bytes = call.num_bytes();
  if (arena == nullptr || num_bytes < min_zero_copy_bytes(call.op, world_size) || call.is_uneven)
    return {};
  const bool is_all_reduce = call.op == OpKind::kAllReduce;
  if ((is_all_reduce && call.is_requested) ||
      (call.op == OpKind::kBroadcast && group_.rank() != call.root) ||
      (call.op == OpKind::kReduceScatter && !is_contiguous(call.inputs, world_size, num_bytes)))
    return {};
  BufferHandle handle{.input = arena->locate(call.inputs[0], input_bytes(call, world_size))};
  if (is_all_reduce) handle.output = arena->locate(call.outputs[0], num_bytes);
  return is_all_reduce && !handle.output.is_somewhere() ? BufferHandle{} : handle;
}

// In the first phase a rank with shared buffers publishes a handle in place of data, so all ranks
// make the same decision (docs/design/protocol.md, "Shared buffers"). Returns false, and has
// run nothing, where a rank that is needed has no handle.
bool ShmTransport::run_zero_copy(ShmCollective& collective, const Collective& call,
                                 const BufferHandle& mine, Traffic& traffic) {
  try {
    if (mine.is_given()) static_cast<void>(context_.publish());
    if (!context_.has_all_handles(call.op == OpKind::kBroadcast ? call.root : -1)) return false;
    context_.step() = {};  // of what was staged in vain
    context_.begin_zero_copy(input_bytes(call, group_.world_size()));
    traffic = {.sent_bytes = collective(context_, call), .algorithm = Algorithm::kDirect};
    return true;
  } catch (...) {
    // A peer without an error may have started, and be in the blocks until it leaves the group.
    if (mine.is_given())
      for (const host::ArenaLocation& location : {mine.input, mine.output})
        host::SharedArena::instance().hold(location, group_.left_by_all());
    throw;
  }
}

// ---- what collectives use

using cpu::StoreKind;

// From this size, the result is not in a cache when the caller reads it, and non-temporal stores
// save the read of the overwritten lines (docs/decisions.md). Below, they cost as
// much as they save.
constexpr std::size_t kStreamedResultBytes = std::size_t{16} << 20;

// How long one request for a peer's memory may take before this rank looks whether it should go on.
constexpr std::chrono::milliseconds kFetchSlice{500};
constexpr std::chrono::milliseconds kFetchPause{1};

ShmContext::ShmContext(host::Group& group, host::GroupWait& guard,
                       const CommunicatorOptions& options)
    : group_(group),
      guard_(guard),
      arch_(guard, group.rank(), &thread_pool_),
      board_(arch_, group.board(), group.rank()),
      staging_(group.rank() == 0,
               options.one_shot_max_bytes == 0 && host::CoreShare::most_ranks_per_core() <= 1,
               options.one_shot_max_bytes > 0 ? options.one_shot_max_bytes
                                              : one_shot_max_bytes(group.world_size())),
      thread_pool_(options.max_threads),
      sources_(static_cast<std::size_t>(group.world_size())),
      handles_(static_cast<std::size_t>(group.world_size())),
      memories_(static_cast<std::size_t>(group.world_size())) {}

void ShmContext::begin(const CallHeader& header, const BufferHandle& handle) {
  header_ = &header;
  first_ = First::kClosed;
  shared_bytes_ = 0;
  copies_.clear();  // of a call that failed
  step() = {};
  handles_[static_cast<std::size_t>(rank())] = handle;
}

std::byte* ShmContext::open() {
  std::byte* region = nullptr;
  check(board_.open(region));
  if (first_ == First::kClosed) first_ = First::kOpen;
  return region;
}

bool ShmContext::publish() {
  finish_copies();
  if (first_ == First::kOver) {
    board_.publish();
    return true;
  }
  const BufferHandle& mine = handle_of(rank());
  if (first_ == First::kClosed) {
    std::byte* region = open();
    if (mine.is_given()) std::memcpy(region, &mine, sizeof(mine));
  }
  // Directly before the publication: peers poll the line that this writes.
  const HeaderLine::Flags flags{mine.is_given(), staging_.next()};
  std::byte* const line = board_.payload(rank());
  std::memcpy(line, &flags, sizeof(flags));
  std::memcpy(line + offsetof(HeaderLine, header), header_, header_->num_wire_bytes());
  board_.publish();
  staging_.pause();
  // Sizes of shards that may differ are compared by Alltoallv.
  const bool has_own_sizes = header_->is_uneven || has_private_sizes(header_->op);
  for (int distance = 1; distance < world_size(); ++distance) {
    const int peer = (rank() + distance) % world_size();
    const std::byte* region = wait(peer);
    const auto [flags, header] = header_line_of(peer);
    if (!(has_own_sizes ? is_same_call(*header_, header) : *header_ == header))
      throw Mismatched{peer, header};
    BufferHandle& handle = handles_[static_cast<std::size_t>(peer)];
    handle = {};
    if (flags.has_handle) std::memcpy(&handle, region, sizeof(handle));
    if (peer == 0) staging_.follow(flags.next);
  }
  staging_.resume();
  guard_.set_arriving(false);
  first_ = First::kOver;
  return !has_handles();
}

const std::byte* ShmContext::wait(int peer) {
  if (is_zero_copy()) return find_shared(peer, handle_of(peer).input, 0, shared_bytes_);
  const std::byte* region = nullptr;
  check(board_.wait(peer, region));
  return region;
}

ShmContext::HeaderLine ShmContext::header_line_of(int peer) {
  const std::byte* place = board_.payload(peer);
  HeaderLine line;
  std::memcpy(&line, place, line.num_bytes());
  if (line.header.has_update) std::memcpy(&line, place, sizeof(line));
  return line;
}

CallHeader ShmContext::header_of(int rank) {
  if (rank == this->rank()) return *header_;
  static_cast<void>(wait(rank));
  return header_line_of(rank).header;
}

bool ShmContext::has_handles() const {
  return std::ranges::any_of(handles_, &BufferHandle::is_given);
}

bool ShmContext::has_all_handles(int rank) const {
  return rank >= 0 ? handle_of(rank).is_given()
                   : std::ranges::all_of(handles_, &BufferHandle::is_given);
}

std::byte* ShmContext::find_shared(int rank, const host::ArenaLocation& location,
                                   std::size_t offset_bytes, std::size_t num_bytes) {
  const host::ArenaLocation place{.region_id = location.region_id,
                                  .offset_bytes = location.offset_bytes + offset_bytes};
  if (rank == this->rank()) return host::SharedArena::instance().address_of(place);
  auto& memory = memories_[static_cast<std::size_t>(rank)];
  if (memory == nullptr) memory = group_.process_of(rank).memory();
  const auto waits = arch_.record_wait(rank);
  for (;;) {
    try {
      if (std::byte* data = memory->find(place, num_bytes, kFetchSlice)) return data;
    } catch (const host::Refused& refused) {
      const int group_rank = group_.group_rank(rank);
      throw Error(
          {.kind = ErrorKind::kSystem, .rank = group_rank, .pid = refused.info().pid},
          "ringcomm: " +
              name_of_process(group_rank, group_.global_rank_of(rank), group_.process_of(rank)) +
              " " + refused.why);
    }
    check(arch_.stopped(rank));  // its process has stopped or ended
    std::this_thread::sleep_for(kFetchPause);
  }
}

void ShmContext::stage(void* to, const void* from, std::size_t num_bytes) {
  copy(to, from, num_bytes, staging_.kind());
}

void ShmContext::copy_result(void* to, const void* from, std::size_t num_bytes,
                             std::size_t result_bytes) {
  if (to == from) return;
  const bool is_streamed = result_bytes >= kStreamedResultBytes;
  copy(to, from, num_bytes, is_streamed ? StoreKind::kStreaming : StoreKind::kCached);
}

void ShmContext::copy(void* to, const void* from, std::size_t num_bytes, StoreKind kind) {
  if (num_bytes == 0) return;
  copied_bytes_ += num_bytes;
  if (!thread_pool_.may_split())
    cpu::copy_bytes(to, from, num_bytes, kind);
  else
    copies_.push_back(
        {static_cast<std::byte*>(to), static_cast<const std::byte*>(from), num_bytes, kind});
}

void ShmContext::finish_copies() {
  if (copies_.empty()) return;
  std::size_t num_bytes = 0;
  for (const Copy& copy : copies_) num_bytes += copy.num_bytes;
  thread_pool_.split(num_bytes, 1, [&](std::size_t begin, std::size_t end) {
    std::size_t first = 0;  // of the copy, among the bytes of all
    for (const Copy& copy : copies_) {
      const std::size_t from = std::max(begin, first);
      const std::size_t to = std::min(end, first + copy.num_bytes);
      if (from < to)
        cpu::copy_bytes(copy.to + (from - first), copy.from + (from - first), to - from, copy.kind);
      first += copy.num_bytes;
    }
  });
  copies_.clear();
}

void ShmContext::reduce(const Collective& call, std::span<const void* const> sources, void* to,
                        void* also_to, const ElemRange& elems, int divisor,
                        const OwnerUpdate* update) {
  const ReduceOp& op = reduce_op_of(call);
  const std::size_t bytes = op.element_bytes;
  const std::size_t also_bytes = update != nullptr ? update->param_bytes() : bytes;
  const auto num_sources = static_cast<int>(sources.size());
  thread_pool_.split_sources(
      sources, elems.num_elems, bytes, [&](const void* const* moved, const ElemRange& part) {
        auto* also = also_to != nullptr ? at(also_to, part.begin_elems, also_bytes) : nullptr;
        if (update != nullptr)
          update->run(moved, num_sources, {elems.begin_elems + part.begin_elems, part.num_elems},
                      also);
        else
          op.combine(at(to, part.begin_elems, bytes), also, moved, num_sources, part.num_elems,
                     divisor);
      });
}

}  // namespace ringcomm
