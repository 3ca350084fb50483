#include "collectives/shm/direct_collectives.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "collectives/reduction.h"
#include "collectives/shm/algorithm_choice.h"
#include "core/chunk_layout.h"
#include "reduce/reduce_op.h"

namespace ringcomm {
namespace {

// The block that is read from all ranks, reduced, and written to all of them before the next one. A
// quarter of it costs 15 % with 4 ranks and 3 % with 2; four times as much gains 3 %
// (docs/experiments.md, "shared buffers"). After a peer's failure, at most one more block is
// written to it.
constexpr std::size_t kBlockBytes = 16 << 10;

// How long one request for a peer's memory may take before this rank looks whether it should go on.
constexpr std::chrono::milliseconds kFetchSlice{100};
constexpr std::chrono::milliseconds kFetchPause{1};

// Whether the shares of an array of buffers are contiguous, so that one location describes all.
bool is_contiguous(const void* const* buffers, int num_buffers, std::size_t num_bytes) {
  for (int i = 1; i < num_buffers; ++i)
    if (buffers[i] != at(buffers[0], static_cast<std::size_t>(i), num_bytes)) return false;
  return true;
}

shm::ArenaLocation offset_by(const shm::ArenaLocation& location, std::size_t num_bytes) {
  return {.region_id = location.region_id, .offset_bytes = location.offset_bytes + num_bytes};
}

}  // namespace

DirectCollectives::DirectCollectives(Engine& engine, Algorithm algorithm)
    : engine_(engine),
      algorithm_(algorithm),
      notes_(static_cast<std::size_t>(engine.world_size())),
      memories_(static_cast<std::size_t>(engine.world_size())) {}

BufferNote DirectCollectives::note_of(const Collective& call) const {
  const shm::SharedArena* arena = shm::SharedArena::find();
  const std::size_t num_bytes = call.num_bytes();
  if (arena == nullptr || call.is_uneven(engine_.world_size())) return {};
  if (num_bytes < min_direct_bytes(call.op, engine_.world_size())) return {};
  const auto world = static_cast<std::size_t>(engine_.world_size());
  BufferNote note;
  switch (call.op) {
    case OpKind::kAllReduce:
      if (call.algorithm != Algorithm::kAuto || algorithm_ != Algorithm::kAuto) return {};
      note = {.input = arena->locate(call.inputs[0], num_bytes),
              .output = arena->locate(call.outputs[0], num_bytes)};
      return note.output.is_somewhere() ? note : BufferNote{};
    case OpKind::kReduceScatter:
      if (is_contiguous(call.inputs, engine_.world_size(), num_bytes))
        note.input = arena->locate(call.inputs[0], world * num_bytes);
      return note;
    case OpKind::kAllGather:
      note.input = arena->locate(call.inputs[0], num_bytes);
      return note;
    case OpKind::kBroadcast:
      if (engine_.rank() == call.root) note.input = arena->locate(call.inputs[0], num_bytes);
      return note;
    default:
      return {};
  }
}

// Publishes this rank's note, unless the first phase has done so, and reads all notes. The result,
// whether the collective runs directly, is the same on every rank.
bool DirectCollectives::agree(const Collective& call, const CallHeader& header,
                              const BufferNote& mine) {
  try {
    if (mine.is_given()) engine_.publish_note(header, mine);
    engine_.read_notes(header, mine, notes_.data());
  } catch (...) {
    retire(mine);  // a peer without an error has started
    throw;
  }
  if (call.op == OpKind::kBroadcast) return notes_[static_cast<std::size_t>(call.root)].is_given();
  return std::all_of(notes_.begin(), notes_.end(),
                     [](const BufferNote& note) { return note.is_given(); });
}

std::uint64_t DirectCollectives::run_directly(const Collective& call) {
  try {
    switch (call.op) {
      case OpKind::kReduceScatter:
        return reduce_scatter(call);
      case OpKind::kAllGather:
        return all_gather(call);
      case OpKind::kBroadcast:
        return broadcast(call);
      default:
        return all_reduce(call);
    }
  } catch (...) {
    retire(notes_[static_cast<std::size_t>(engine_.rank())]);
    throw;
  }
}

// Each rank reduces its own chunk of all buffers into all of them: one rank reads and writes every
// byte once, which is the minimum.
std::uint64_t DirectCollectives::all_reduce(const Collective& call) {
  const int rank = engine_.rank();
  const int world_size = engine_.world_size();
  const std::size_t bytes = element_bytes(call.dtype);
  const ReduceOp& op = reduce_op_of(call);
  const ElemRange own = ChunkLayout(call.num_elems, world_size).chunk(rank);
  std::vector<const std::byte*> inputs;
  std::vector<std::byte*> outputs;
  for (int peer = 0; peer < world_size; ++peer) {
    const BufferNote& note = notes_[static_cast<std::size_t>(peer)];
    const std::size_t begin_bytes = own.begin_elems * bytes;
    inputs.push_back(locate(peer, offset_by(note.input, begin_bytes), own.num_elems * bytes));
    outputs.push_back(locate(peer, offset_by(note.output, begin_bytes), own.num_elems * bytes));
  }
  const int next = (rank + 1) % world_size;
  const std::size_t block_elems = kBlockBytes / bytes;
  std::vector<const void*> sources(inputs.size());
  for (std::size_t i = 0; i < num_slices(own.num_elems, block_elems); ++i) {
    check_not_aborted();
    const ElemRange block = slice_of({0, own.num_elems}, i, block_elems);
    const std::size_t offset_bytes = block.begin_elems * bytes;
    for (std::size_t peer = 0; peer < sources.size(); ++peer)
      sources[peer] = inputs[peer] + offset_bytes;
    std::byte* result = outputs[static_cast<std::size_t>(rank)] + offset_bytes;
    op.combine(result, outputs[static_cast<std::size_t>(next)] + offset_bytes, sources.data(),
               world_size, block.num_elems, divisor_of(call, world_size));
    for (int distance = 2; distance < world_size; ++distance)
      std::memcpy(outputs[static_cast<std::size_t>((rank + distance) % world_size)] + offset_bytes,
                  result, block.num_elems * bytes);
  }
  engine_.rejoin();
  const auto num_peers = static_cast<std::uint64_t>(world_size - 1);
  return (call.num_elems - own.num_elems + num_peers * own.num_elems) * bytes;
}

std::uint64_t DirectCollectives::reduce_scatter(const Collective& call) {
  const int rank = engine_.rank();
  const int world_size = engine_.world_size();
  const std::size_t num_bytes = call.num_bytes();
  std::vector<const void*> sources;
  for (int peer = 0; peer < world_size; ++peer) {
    const shm::ArenaLocation& input = notes_[static_cast<std::size_t>(peer)].input;
    sources.push_back(
        locate(peer, offset_by(input, static_cast<std::size_t>(rank) * num_bytes), num_bytes));
  }
  reduce_op_of(call).combine(call.outputs[0], nullptr, sources.data(), world_size, call.num_elems,
                             divisor_of(call, world_size));
  engine_.rejoin();
  return static_cast<std::uint64_t>(world_size - 1) * num_bytes;
}

std::uint64_t DirectCollectives::all_gather(const Collective& call) {
  const int rank = engine_.rank();
  const int world_size = engine_.world_size();
  const std::size_t num_bytes = call.num_bytes();
  for (int distance = 0; distance < world_size; ++distance) {
    const int peer = (rank + distance) % world_size;
    engine_.copy_result(call.outputs[peer],
                        locate(peer, notes_[static_cast<std::size_t>(peer)].input, num_bytes),
                        num_bytes, static_cast<std::size_t>(world_size) * num_bytes);
  }
  engine_.rejoin();
  return static_cast<std::uint64_t>(world_size - 1) * num_bytes;
}

std::uint64_t DirectCollectives::broadcast(const Collective& call) {
  const bool is_root = engine_.rank() == call.root;
  const std::size_t num_bytes = call.num_bytes();
  if (!is_root)
    engine_.copy_result(
        call.outputs[0],
        locate(call.root, notes_[static_cast<std::size_t>(call.root)].input, num_bytes), num_bytes,
        num_bytes);
  engine_.rejoin();
  return is_root ? static_cast<std::uint64_t>(engine_.world_size() - 1) * num_bytes : 0;
}

std::byte* DirectCollectives::locate(int rank, const shm::ArenaLocation& location,
                                     std::size_t num_bytes) {
  if (rank == engine_.rank()) return shm::SharedArena::instance().address_of(location);
  auto& memory = memories_[static_cast<std::size_t>(rank)];
  if (memory == nullptr)
    memory = shm::PeerMemory::of(engine_.group().process_of(rank).bootstrap_address);
  for (;;) {
    if (std::byte* data = memory->find(location, num_bytes, kFetchSlice)) return data;
    // Its process has stopped or ended.
    Engine::check(engine_.arch().stopped(rank));
    std::this_thread::sleep_for(kFetchPause);
  }
}

// A failed peer may have returned to its caller, which may reuse the buffer. So this rank stops
// writing to it after the current block.
void DirectCollectives::check_not_aborted() {
  Engine::check(engine_.group().state_of(engine_.rank()));
}

// The call has failed on this rank, and a peer may still be in the block at hand.
void DirectCollectives::retire(const BufferNote& note) const {
  if (!note.is_given()) return;
  shm::SharedArena& arena = shm::SharedArena::instance();
  arena.retire(note.input);
  arena.retire(note.output);
}

}  // namespace ringcomm
