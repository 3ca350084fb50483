#include "cuda/collectives/peer_allocations.h"

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "core/errors.h"

namespace ringcomm::cuda {
namespace {

// A rank that cannot announce tries again after so many buffers, and one that could not map an
// allocation after so many calls.
constexpr std::uint64_t kFailuresPerTry = 64;
// The watchdog looks for freed memory after so many looks without a call, at so many rows a look.
constexpr int kIdleLooks = 25;
constexpr std::size_t kRowsPerLook = 16;
constexpr std::chrono::milliseconds kReleasePoll{2};
constexpr std::ptrdiff_t kMostOffers = 128;  // each is an open file

bool contains(const Allocation& allocation, const std::byte* data, std::uint64_t num_bytes) {
  const auto begin = reinterpret_cast<DevicePtr>(data);
  return begin >= allocation.base && begin + num_bytes <= allocation.base + allocation.num_bytes;
}

bool exists(std::uint64_t version) { return version % 2 == 1; }

// Those of all groups of this process.
struct Registry {
  std::mutex mutex;
  std::set<PeerAllocations*> all;
};

Registry& registry() {
  static auto& all = *new Registry();
  return all;
}

}  // namespace

PeerAllocations::PeerAllocations(RecordExchange& exchange, DeviceGroup& group)
    : exchange_(exchange),
      group_(group),
      rank_(exchange.rank()),
      world_size_(exchange.world_size()),
      mappings_(PeerMappings::of(group.device())),
      running_(RunningKernels::of(group.device())),
      bases_(group.device(), kMaxRows * static_cast<std::size_t>(world_size_) * sizeof(std::byte*)),
      theirs_(static_cast<std::size_t>(world_size_)) {
  const std::lock_guard lock(registry().mutex);
  registry().all.insert(this);
}

PeerAllocations::~PeerAllocations() {
  const std::lock_guard lock(registry().mutex);
  registry().all.erase(this);
}

// ---- this rank's allocations

void PeerAllocations::find_places(std::uint64_t number, std::vector<PeerBuffer>& buffers,
                                  bool asked) {
  const std::lock_guard lock(mutex_);
  const bool wants_all = asked || group_.maps_tensors();
  if (!wants_all && own_.empty()) return;
  Allocation last;
  Place place = 0;
  for (PeerBuffer& buffer : buffers) {
    if (buffer.num_bytes == 0) continue;
    if (!contains(last, buffer.data, buffer.num_bytes)) {
      // Freed ones are found even if the program allocates nothing more.
      if (!own_.empty()) retire_if_freed(num_looks_++ % own_.size());
      last = allocation_of(buffer.data);
      place = place_of(last, number, wants_all);
      // Pieces that are side by side are as one, here and for peers.
      while (last.piece != nullptr && !contains(last, buffer.data, buffer.num_bytes)) {
        const DevicePtr end = last.base + last.num_bytes;
        const Allocation next = allocation_of(reinterpret_cast<const std::byte*>(end));
        if (next.range_base != last.range_base || next.base != end) break;
        if (place_of(next, number, wants_all) == 0) place = 0;
        last.num_bytes += next.num_bytes;
      }
    }
    if (place != 0 && contains(last, buffer.data, buffer.num_bytes))
      buffer.place = place + (reinterpret_cast<DevicePtr>(buffer.data) - last.base);
    if (place == 0 && last.piece != nullptr) last = {};  // the next buffer may be in some of them
  }
}

bool PeerAllocations::map_now(const std::byte* data, std::size_t num_bytes, std::uint64_t number) {
  {
    const std::lock_guard lock(mutex_);
    num_failures_ = 0;
  }
  std::vector<PeerBuffer> buffers = {{data, data != nullptr ? num_bytes : 0}};
  enum State : std::uint8_t { kMapped, kSomeMore, kRefused };
  State state = kRefused;
  do {  // some pieces at a time
    const std::uint64_t num_before = num_published_;
    find_places(number, buffers, /*asked=*/true);
    for (int round = 0; round < 2; ++round) {  // all have announced; all have mapped
      follow(number, /*may_unmap=*/false);
      exchange_.all_gather(0);
    }
    find_places(number, buffers);
    const bool is_mapped = num_bytes == 0 || buffers[0].place != 0;
    state = is_mapped ? kMapped : num_published_ != num_before ? kSomeMore : kRefused;
    state = std::ranges::max(exchange_.all_gather(state));
  } while (state == kSomeMore);
  return state == kMapped;
}

// Of the first byte of an allocation of this rank; 0 where peers have yet to map it, or it cannot
// be mapped.
Place PeerAllocations::place_of(const Allocation& allocation, std::uint64_t number,
                                bool is_wanted) {
  if (is_wanted && !allocation.has_handle)
    why_staged_ =
        "other processes cannot map them: a pool's, allocations of no multiple of 2 MiB, or "
        "unshared expandable segments";
  if (!allocation.has_handle) return 0;
  const std::size_t row = find(allocation.id);
  if (row == kMaxRows) {
    if (is_wanted && wanted_.size() < kMaxRows)
      wanted_.push_back(reinterpret_cast<const std::byte*>(allocation.base));
    return 0;
  }
  const bool is_lent = is_known_to_all(row) && row_of(rank_, row).failed == 0 &&
                       number >= row_of(rank_, row).first_call;
  return is_lent ? place_in(row, 0) : 0;
}

void PeerAllocations::write_base(std::size_t row, int rank, std::byte* base) {
  const auto world_size = static_cast<std::size_t>(world_size_);
  group_.control().copied = reinterpret_cast<std::uintptr_t>(base);
  copy_and_wait(bases_.data() + (row * world_size + static_cast<std::size_t>(rank)) * sizeof base,
                &group_.control_on_device()->copied, sizeof base, "tell kernels of shared memory");
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
  if (!allocation.has_handle || find(allocation.id) != kMaxRows) return;
  if (num_failures_ % kFailuresPerTry != 0) return void(++num_failures_);
  const auto has_offer = [](const Own& own) { return own.offer != nullptr; };
  if (allocation.piece != nullptr && std::ranges::count_if(own_, has_offer) >= kMostOffers) return;
  const std::size_t row = free_row();
  bool is_announced = false;
  if (row == kMaxRows)
    why_staged_ = "a group maps at most 4,096 allocations of a rank";
  else if (is_memory_scarce())
    why_staged_ = "less than a sixteenth of the GPU's memory is free";
  else
    try {
      Own own{.id = allocation.id, .base = allocation.base, .piece = allocation.piece};
      PeerAllocation mine{
          .process = group_.place(rank_).process, .id = allocation.id, .base = allocation.base};
      if (allocation.piece == nullptr) {
        check(driver().ipc_get_mem_handle(&mine.handle, allocation.base), "hand out GPU memory");
      } else {
        own.offer = std::make_unique<host::Offer>(export_memory(allocation.piece->handle));
        own.offer->key().copy(mine.handle.reserved, sizeof mine.handle.reserved - 1);
        mine.num_bytes = allocation.num_bytes;
        mine.range_base = allocation.range_base;
        mine.range_bytes = allocation.range_bytes;
      }
      row_of(rank_, row).allocation = mine;
      write_base(row, rank_, reinterpret_cast<std::byte*>(allocation.base));
      if (own_.size() <= row) own_.resize(row + 1);
      own_[row] = std::move(own);
      publish(row);
      is_announced = true;
    } catch (const Error&) {  // the buffer is staged
    }
  num_failures_ = is_announced ? 0 : num_failures_ + 1;
}

// Ends offers that all peers have taken up.
void PeerAllocations::end_offers() {
  for (std::size_t row = 0; row < own_.size(); ++row)
    if (own_[row].offer != nullptr && is_known_to_all(row) && row_of(rank_, row).failed == 0)
      own_[row].offer = nullptr;
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
  mine.num_following = mine.failed = 0;
  mine.first_call = 0;
  ++num_published_;
  ++mine.version;
  ++group_.words().num_announced;
}

// ---- those of its peers

bool PeerAllocations::has_news() {
  const std::lock_guard lock(mutex_);
  return !wanted_.empty() || has_postponed_ || group_.words().num_announced != num_followed_ ||
         (num_failed_ > 0 && ++num_waits_ % kFailuresPerTry == 0);
}

// Calls body(rank, row) for rows of peers whose last version is to be followed.
template <class Body>
void PeerAllocations::for_news(bool exist, const Body& body) {
  for (int rank = 0; rank < world_size_; ++rank) {
    if (rank == rank_) continue;
    std::vector<Theirs>& all = theirs_[static_cast<std::size_t>(rank)];
    for (std::size_t row = 0; row < kMaxRows; ++row) {
      const std::uint64_t version = row_of(rank, row).version;
      if (version == 0) break;  // nor has any later row been in use
      if (all.size() <= row) all.resize(row + 1);
      if ((version != all[row].version || all[row].has_failed) && exists(version) == exist)
        body(rank, row);
    }
  }
}

void PeerAllocations::follow(std::uint64_t call, bool may_unmap) {
  const std::lock_guard lock(mutex_);
  num_followed_ = group_.words().num_announced;
  silent_ranks_ = 0;
  if (may_unmap) unmap_retired();
  has_postponed_ = has_retired();
  for_news(true, [&](int rank, std::size_t row) { map(rank, row, call); });
  end_offers();
  if (!wanted_.empty() && num_failures_ % kFailuresPerTry == 0)
    for (std::size_t row = 0; row < own_.size(); ++row) retire_if_freed(row);
  for (const std::byte* data : std::exchange(wanted_, {})) announce(data);
}

bool PeerAllocations::has_retired() {
  bool found = false;
  for_news(false, [&](int, std::size_t) { found = true; });
  return found;
}

void PeerAllocations::unmap_retired() {
  for_news(false, [&](int rank, std::size_t row) {
    GroupWords::OfAllocation& source = row_of(rank, row);
    Theirs& theirs = theirs_[static_cast<std::size_t>(rank)][row];
    if (theirs.mapping != nullptr) mappings_.unmap(*theirs.mapping);
    num_failed_ -= theirs.has_failed ? 1 : 0;
    theirs = {.version = source.version};
    ++source.num_following;  // last: the owner then counts this rank
  });
}

// One that could not be mapped is tried again.
void PeerAllocations::map(int rank, std::size_t row, std::uint64_t call) {
  GroupWords::OfAllocation& source = row_of(rank, row);
  Theirs& theirs = theirs_[static_cast<std::size_t>(rank)][row];
  const std::uint64_t version = source.version;
  const std::uint32_t bit = std::uint32_t{1} << rank_;
  const RankPlace &place = group_.place(rank), &own = group_.place(rank_);
  std::byte* base = nullptr;
  try {
    if (place.process != own.process) {
      theirs.mapping = mappings_.map(source.allocation, [&] {
        // One that is stopped costs the time of one attempt, and not of one for each piece.
        const std::uint32_t rank_bit = std::uint32_t{1} << rank;
        if ((std::exchange(silent_ranks_, silent_ranks_ | rank_bit) & rank_bit) != 0)
          throw Error({.rank = rank}, "a rank is silent");
        auto fd = host::Offer::fetch(place.bootstrap_address.str(), rank,
                                     source.allocation.handle.reserved);
        silent_ranks_ &= ~rank_bit;
        return fd;
      });
      base = theirs.mapping->data;
    } else if (place.device == own.device) {
      base = reinterpret_cast<std::byte*>(source.allocation.base);
    }  // or else threads would need the peer access of two contexts
    if (base != nullptr) write_base(row, rank, base);
  } catch (const Error&) {  // such as of memory that has been freed meanwhile
    base = nullptr;
  }
  if (base != nullptr) {
    std::uint64_t first = source.first_call;
    while (first < call && !source.first_call.compare_exchange_weak(first, call)) {
    }
    source.failed &= ~bit;
  } else {
    theirs.mapping = nullptr;
    source.failed |= bit;
  }
  num_failed_ += (base == nullptr ? 1 : 0) - (theirs.has_failed ? 1 : 0);
  theirs.has_failed = base == nullptr;
  if (std::exchange(theirs.version, version) != version)
    ++source.num_following;  // last: the owner then counts this rank
}

// ---- without a call

void PeerAllocations::look() noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return;
  const std::uint64_t num_announced = group_.words().num_announced;
  num_idle_ = num_looks_ == num_looks_seen_ ? std::min(num_idle_ + 1, kIdleLooks) : 0;
  num_looks_seen_ = num_looks_;
  end_offers();
  const bool looks_at_own = num_idle_ == kIdleLooks && !own_.empty();
  if (!looks_at_own && num_announced == num_seen_) return;
  try_in_context(group_.device(), [&] {
    for (std::size_t i = 0; looks_at_own && i < std::min(kRowsPerLook, own_.size()); ++i)
      retire_if_freed(next_row_++ % own_.size());
    if (!has_retired() || running_.if_over([this] { unmap_retired(); })) num_seen_ = num_announced;
  });
}

bool PeerAllocations::release(std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  for (;; std::this_thread::sleep_for(kReleasePoll)) {
    bool is_done = true;
    {
      const std::lock_guard lock(registry().mutex);
      for (PeerAllocations* one : registry().all) is_done = one->release() && is_done;
    }
    if (is_done || std::chrono::steady_clock::now() >= deadline) return is_done;
  }
}

bool PeerAllocations::release() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  const ContextGuard guard(group_.device());
  const RelaxedCapture relaxed;
  bool is_done = true;
  for (std::size_t row = 0; row < own_.size(); ++row) {
    retire_if_freed(row);
    is_done = is_done && (own_[row].id == 0 ? is_known_to_all(row) : !is_freed(row));
  }
  return (!has_retired() || running_.if_over([this] { unmap_retired(); })) && is_done;
}

}  // namespace ringcomm::cuda
