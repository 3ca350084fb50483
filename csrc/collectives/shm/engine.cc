#include "collectives/shm/engine.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <thread>

namespace ringcomm {

using host::StoreKind;

namespace {

// From this size, the result is not in a cache when the caller reads it, and non-temporal stores
// save the read of the overwritten lines (docs/experiments.md, "all_gather"). Below, they cost as
// much as they save.
constexpr std::size_t kStreamedResultBytes = std::size_t{16} << 20;

// How long one request for a peer's memory may take before this rank looks whether it should go on.
constexpr std::chrono::milliseconds kFetchSlice{100};
constexpr std::chrono::milliseconds kFetchPause{1};

CallHeader header_at(const std::byte* place) {
  CallHeader header;
  std::memcpy(&header, place, header.told_bytes());
  if (header.has_update) std::memcpy(&header, place, header.told_bytes());
  return header;
}

// Sizes of shares that may differ are compared by ShareExchange.
bool is_compatible(const CallHeader& mine, const CallHeader& theirs) {
  if (mine.is_uneven || has_private_sizes(mine.op)) return is_same_call(mine, theirs);
  return mine == theirs;
}

}  // namespace

void StoreKindChooser::begin(OpKind op, std::size_t num_bytes) {
  timed_ = nullptr;
  kind_ = StoreKind::kCached;
  if (num_bytes < kMinBytes) return;
  const auto class_idx =
      std::min<std::size_t>(std::bit_width(num_bytes / kMinBytes) - 1, kNumClasses - 1);
  timed_ = &classes_[static_cast<std::size_t>(op)][class_idx];
  kind_ = timed_->is_streaming() ? StoreKind::kStreaming : StoreKind::kCached;
  begin_ = Clock::now();
}

void StoreKindChooser::end() {
  if (timed_ == nullptr) return;
  record(*timed_, std::chrono::duration<float, std::micro>(Clock::now() - begin_).count());
}

void StoreKindChooser::record(SizeClass& size_class, float elapsed_us) {
  if (!size_class.is_warm) {
    size_class.is_warm = true;
    // The other kind is tried after as many calls as it takes to measure this one.
    size_class.num_calls = kKeptCalls - kTrialCalls;
    return;
  }
  float& best_us = size_class.best_us[size_class.is_streaming() ? 1 : 0];
  const bool is_fresh = best_us == 0 || (size_class.is_trial && size_class.num_calls == 0);
  const bool is_slow = !is_fresh && elapsed_us > kSuspicious * best_us;
  best_us = is_fresh ? elapsed_us : std::min(elapsed_us, best_us * kForget);
  size_class.num_slow = is_slow ? size_class.num_slow + 1 : 0;
  ++size_class.num_calls;

  if (!size_class.is_trial) {
    if (size_class.num_calls < kKeptCalls && size_class.num_slow < kSlowCalls) return;
    // Slow for several calls, so its best time is out of date.
    if (size_class.num_slow >= kSlowCalls) best_us = elapsed_us;
  } else {
    if (size_class.num_calls < kTrialCalls) return;
    const float kept_us = size_class.best_us[size_class.is_streaming_kept ? 1 : 0];
    if (best_us < kMargin * kept_us) size_class.is_streaming_kept = !size_class.is_streaming_kept;
  }
  size_class.is_trial = !size_class.is_trial;
  size_class.num_calls = 0;
  size_class.num_slow = 0;
}

Engine::Engine(shm::Group& group, shm::WaitScope& scope)
    : group_(group),
      arch_(scope, group),
      board_(arch_, group.board(), group.rank()),
      notes_(static_cast<std::size_t>(group.world_size())),
      memories_(static_cast<std::size_t>(group.world_size())) {}

void Engine::begin(const CallHeader& header, const BufferNote& note) {
  header_ = &header;
  first_ = First::kClosed;
  shared_bytes_ = 0;
  notes_[static_cast<std::size_t>(rank())] = note;
}

std::byte* Engine::open() {
  std::byte* region = nullptr;
  check(board_.open(region));
  if (first_ != First::kOver) {
    first_ = First::kOpen;
    std::memcpy(region, header_, header_->told_bytes());
    std::memcpy(region + kNoteOffsetBytes, &note_of(rank()), sizeof(BufferNote));
  }
  return region + kHeaderBytes;
}

bool Engine::publish() {
  if (first_ == First::kClosed) open();
  board_.publish();
  if (first_ == First::kOver) return true;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    const std::byte* place = wait(peer) - kHeaderBytes;
    const CallHeader theirs = header_at(place);
    if (!is_compatible(*header_, theirs)) throw Mismatched{peer, theirs};
    std::memcpy(&notes_[static_cast<std::size_t>(peer)], place + kNoteOffsetBytes,
                sizeof(BufferNote));
  }
  first_ = First::kOver;
  return !has_notes();
}

const std::byte* Engine::wait(int peer) {
  if (is_sharing()) return find_shared(peer, note_of(peer).input, 0, shared_bytes_);
  const std::byte* region = nullptr;
  check(board_.wait(peer, region));
  return region + kHeaderBytes;
}

CallHeader Engine::header_of(int rank) {
  return rank == this->rank() ? *header_ : header_at(wait(rank) - kHeaderBytes);
}

bool Engine::has_notes() const { return std::ranges::any_of(notes_, &BufferNote::is_given); }

bool Engine::has_all_notes(int rank) const {
  return rank >= 0 ? note_of(rank).is_given() : std::ranges::all_of(notes_, &BufferNote::is_given);
}

std::byte* Engine::find_shared(int rank, const shm::ArenaLocation& location,
                               std::size_t offset_bytes, std::size_t num_bytes) {
  const shm::ArenaLocation place{.region_id = location.region_id,
                                 .offset_bytes = location.offset_bytes + offset_bytes};
  if (rank == this->rank()) return shm::SharedArena::instance().address_of(place);
  auto& memory = memories_[static_cast<std::size_t>(rank)];
  if (memory == nullptr) memory = shm::PeerMemory::of(group_.process_of(rank).bootstrap_address);
  for (;;) {
    if (std::byte* data = memory->find(place, num_bytes, kFetchSlice)) return data;
    check(arch_.stopped(rank));  // its process has stopped or ended
    std::this_thread::sleep_for(kFetchPause);
  }
}

void Engine::stage(void* to, const void* from, std::size_t num_bytes) {
  if (num_bytes > 0) host::copy_bytes(to, from, num_bytes, store_kinds_.kind());
  copied_bytes_ += num_bytes;
}

void Engine::copy_result(void* to, const void* from, std::size_t num_bytes,
                         std::size_t result_bytes) {
  if (num_bytes == 0 || to == from) return;
  const bool is_streamed = result_bytes >= kStreamedResultBytes;
  host::copy_bytes(to, from, num_bytes, is_streamed ? StoreKind::kStreaming : StoreKind::kCached);
  copied_bytes_ += num_bytes;
}

}  // namespace ringcomm
