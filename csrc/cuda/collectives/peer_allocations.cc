#include "cuda/collectives/peer_allocations.h"

#include <unistd.h>

#include <utility>

#include "core/errors.h"

namespace ringcomm::cuda {
namespace {

// A rank that cannot announce tries again after so many buffers.
constexpr std::uint64_t kFailuresPerTry = 64;

bool exists(std::uint64_t version) { return version % 2 == 1; }

}  // namespace

PeerAllocations::PeerAllocations(const RecordExchange& exchange, DeviceGroup& group,
                                 WriteBase write_base)
    : group_(group),
      rank_(exchange.rank()),
      world_size_(exchange.world_size()),
      write_base_(std::move(write_base)),
      theirs_(static_cast<std::size_t>(world_size_)) {}

PeerAllocations::Place PeerAllocations::place_of(const std::byte* data, std::size_t num_bytes) {
  // Freed ones are found even if the program allocates nothing more.
  if (!own_.empty()) retire_if_freed(next_look_++ % own_.size());
  const Allocation allocation = allocation_of(data);
  const std::uint64_t offset = reinterpret_cast<DevicePtr>(data) - allocation.base;
  const bool can_lend = allocation.has_ipc_handle && offset + num_bytes <= allocation.num_bytes;
  const std::size_t row = can_lend ? find(allocation.id) : kMaxRows;
  const bool is_new = can_lend && row == kMaxRows;
  if (is_new && wanted_.size() < kMaxRows) wanted_.push_back(data);
  if (!is_new) refuse(!can_lend || row_of(rank_, row).num_failed > 0);
  const bool is_lent = row != kMaxRows && is_known_to_all(row) && group_.words().num_refusing == 0;
  return {.row = row, .offset = offset, .is_lent = is_lent};
}

std::size_t PeerAllocations::find(std::uint64_t id) const {
  for (std::size_t row = 0; row < own_.size(); ++row)
    if (own_[row].id == id) return row;
  return kMaxRows;
}

bool PeerAllocations::is_known_to_all(std::size_t row) const {
  return row_of(rank_, row).num_following + 1 == static_cast<std::uint32_t>(world_size_);
}

void PeerAllocations::announce(const std::byte* data) {
  const Allocation allocation = allocation_of(data);  // which may have changed since the call
  if (!allocation.has_ipc_handle || find(allocation.id) != kMaxRows) return;
  if (num_failures_ % kFailuresPerTry != 0) return void(++num_failures_);
  for (std::size_t row = 0; row < own_.size(); ++row) {
    retire_if_freed(row);
    // It may have had the same address, which peers are to unmap first.
    if (is_freed(row)) return wanted_.push_back(data);
  }
  const std::size_t row = free_row();
  bool is_announced = false;
  if (row != kMaxRows && !is_memory_scarce()) try {
      GroupWords::OfAllocation& mine = row_of(rank_, row);
      check(driver().ipc_get_mem_handle(&mine.handle, allocation.base), "hand out GPU memory");
      mine.base = allocation.base;
      write_base_(row, rank_, reinterpret_cast<std::byte*>(allocation.base));
      if (own_.size() <= row) own_.resize(row + 1);
      own_[row] = {.id = allocation.id, .base = allocation.base};
      publish(row);
      is_announced = true;
    } catch (const Error&) {  // the buffer is staged
    }
  num_failures_ = is_announced ? 0 : num_failures_ + 1;
  refuse(!is_announced);
}

// kMaxRows if there is none.
std::size_t PeerAllocations::free_row() const {
  std::size_t row = 0;
  while (row < own_.size() && (own_[row].id != 0 || !is_known_to_all(row))) ++row;
  return row;
}

bool PeerAllocations::is_freed(std::size_t row) const {
  const Own& own = own_[row];
  return own.id != 0 && allocation_of(reinterpret_cast<const std::byte*>(own.base)).id != own.id;
}

void PeerAllocations::retire_if_freed(std::size_t row) {
  if (!is_known_to_all(row) || !is_freed(row)) return;
  own_[row] = {};
  publish(row);
}

// Only when all peers know the row's last version.
void PeerAllocations::publish(std::size_t row) {
  GroupWords::OfAllocation& mine = row_of(rank_, row);
  mine.num_following = mine.num_failed = 0;
  ++mine.version;
  ++group_.words().num_announced;
}

void PeerAllocations::follow() {
  num_followed_ = group_.words().num_announced;
  // The driver may refuse an address of a peer at which it has an older allocation mapped.
  for (const bool maps : {false, true})
    for (int rank = 0; rank < world_size_; ++rank) {
      if (rank == rank_) continue;
      std::vector<Theirs>& all = theirs_[static_cast<std::size_t>(rank)];
      for (std::size_t row = 0; row < kMaxRows; ++row) {
        const std::uint64_t version = row_of(rank, row).version;
        if (version == 0) break;  // nor has any later row been in use
        if (all.size() <= row) all.resize(row + 1);
        if (version != all[row].version && exists(version) == maps) follow(rank, row);
      }
    }
  for (const std::byte* data : std::exchange(wanted_, {})) announce(data);
}

void PeerAllocations::follow(int rank, std::size_t row) {
  GroupWords::OfAllocation& source = row_of(rank, row);
  Theirs& theirs = theirs_[static_cast<std::size_t>(rank)][row];
  theirs.memory.reset();
  if (exists(source.version)) try {
      std::byte* base = reinterpret_cast<std::byte*>(source.base);
      if (group_.place(rank).pid != ::getpid()) {
        theirs.memory = std::make_unique<DeviceMemory>(group_.device(), source.handle);
        base = theirs.memory->data();
      } else if (group_.place(rank).device != group_.place(rank_).device) {
        ++source.num_failed;  // threads would need the peer access of two contexts
      }
      write_base_(row, rank, base);
    } catch (const Error&) {  // such as of memory that has been freed meanwhile
      ++source.num_failed;
    }
  theirs.version = source.version;
  ++source.num_following;  // last: the owner then counts this rank
}

// If one rank stages its buffers all do: otherwise every call begins again with staging.
void PeerAllocations::refuse(bool is_refusing) {
  if (is_refusing == is_refusing_) return;
  is_refusing_ = is_refusing;
  group_.words().num_refusing += is_refusing ? 1 : -1;
}

}  // namespace ringcomm::cuda
