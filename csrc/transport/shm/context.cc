#include "transport/shm/context.h"

#include <cstring>
#include <thread>

#include "core/errors.h"
#include "host/bootstrap.h"

namespace ringcomm {

using cpu::StoreKind;

// From this size, the result is not in a cache when the caller reads it, and non-temporal stores
// save the read of the overwritten lines (docs/experiments.md, "all_gather"). Below, they cost as
// much as they save.
constexpr std::size_t kStreamedResultBytes = std::size_t{16} << 20;

// How long one request for a peer's memory may take before this rank looks whether it should go on.
constexpr std::chrono::milliseconds kFetchSlice{500};
constexpr std::chrono::milliseconds kFetchPause{1};

ShmContext::ShmContext(host::Group& group, host::WaitScope& scope, int max_threads)
    : group_(group),
      scope_(scope),
      arch_(scope, group, workers_),
      board_(arch_, group.board(), group.rank()),
      store_kinds_(group.rank() == 0),
      workers_(max_threads),
      sources_(static_cast<std::size_t>(group.world_size())),
      handles_(static_cast<std::size_t>(group.world_size())),
      memories_(static_cast<std::size_t>(group.world_size())) {}

void ShmContext::begin(const CallHeader& header, const BufferHandle& handle) {
  // A call over several hosts has many parts here.
  arch_.set_arriving(num_calls_ != header.seq + 1);
  num_calls_ = header.seq + 1;
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
  const HeaderLine line{mine.is_given(), store_kinds_.is_next_streaming(), *header_};
  std::memcpy(board_.beside(rank()), &line, line.num_bytes());
  board_.publish();
  store_kinds_.pause();
  // Sizes of shards that may differ are compared by Alltoallv.
  const bool has_own_sizes = header_->is_uneven || has_private_sizes(header_->op);
  for (int distance = 1; distance < world_size(); ++distance) {
    const int peer = (rank() + distance) % world_size();
    const std::byte* region = wait(peer);
    const HeaderLine line = header_line_of(peer);
    if (!(has_own_sizes ? is_same_call(*header_, line.header) : *header_ == line.header))
      throw Mismatched{peer, line.header};
    BufferHandle& handle = handles_[static_cast<std::size_t>(peer)];
    handle = {};
    if (line.has_handle) std::memcpy(&handle, region, sizeof(handle));
    if (peer == 0) store_kinds_.follow(line.is_next_streaming);
  }
  store_kinds_.resume();
  arch_.set_arriving(false);
  first_ = First::kOver;
  return !has_handles();
}

const std::byte* ShmContext::wait(int peer) {
  if (is_sharing()) return find_shared(peer, handle_of(peer).input, 0, shared_bytes_);
  const std::byte* region = nullptr;
  check(board_.wait(peer, region));
  return region;
}

ShmContext::HeaderLine ShmContext::header_line_of(int peer) {
  const std::byte* place = board_.beside(peer);
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
  for (;;) {
    try {
      if (std::byte* data = memory->find(place, num_bytes, kFetchSlice)) return data;
    } catch (const host::Refused& refused) {
      const int whole_rank = group_.whole_rank(rank);
      throw Error(
          {.kind = ErrorKind::kSystem, .rank = whole_rank, .pid = refused.info().pid},
          "ringcomm: " +
              name_of_process(whole_rank, group_.global_rank_of(rank), group_.process_of(rank)) +
              " " + refused.why);
    }
    check(arch_.stopped(rank));  // its process has stopped or ended
    std::this_thread::sleep_for(kFetchPause);
  }
}

void ShmContext::stage(void* to, const void* from, std::size_t num_bytes) {
  copy(to, from, num_bytes, store_kinds_.kind());
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
  if (!workers_.may_split())
    cpu::copy_bytes(to, from, num_bytes, kind);
  else
    copies_.push_back(
        {static_cast<std::byte*>(to), static_cast<const std::byte*>(from), num_bytes, kind});
}

void ShmContext::finish_copies() {
  if (copies_.empty()) return;
  std::size_t num_bytes = 0;
  for (const Copy& copy : copies_) num_bytes += copy.num_bytes;
  workers_.split(num_bytes, 1, [&](std::size_t begin, std::size_t end) {
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
  workers_.split_sources(
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
