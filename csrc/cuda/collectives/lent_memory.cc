#include "cuda/collectives/lent_memory.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

#include "core/errors.h"

namespace ringcomm::cuda {

// Of a buffer for which the driver is asked whose memory it is in.
constexpr std::size_t kMinMappedBytes = std::size_t{64} << 10;
constexpr std::size_t kMaxSegments = GroupWords::kMaxSegments;

void Loan::give_back(const std::vector<StreamHandle>& streams) const noexcept {
  try {
    const ContextGuard guard(device_);
    const RelaxedCapture relaxed;
    Return mine{.row = row_, .is_captured = false, .ends = {}};
    for (StreamHandle stream : streams) {
      if (capture_of(stream) != 0)
        mine.is_captured = true;
      else
        mine.ends.push_back(EventPool::of(device_).record(stream));
    }
    {
      const std::lock_guard lock(returns_->mutex);
      if (!returns_->is_closed) return returns_->all.push_back(std::move(mine));
    }
    for (const auto& end : mine.ends)
      check(driver().event_synchronize(end->get()), "wait for the GPU");
  } catch (const std::exception&) {
    // The process is ending and the driver was unloaded before, which frees the memory.
  }
}

LentMemory::LentMemory(RecordExchange& exchange, DeviceGroup& group)
    : exchange_(exchange),
      group_(group),
      maps_tensors_(group.maps_tensors() && !group.takes_turns()),
      returns_(std::make_shared<Loan::Returns>()),
      allocations_(exchange, group, [this](std::size_t row, int rank, std::byte* base) {
        tell_kernels(kMaxSegments + row, rank, {base});
      }) {}

LentMemory::~LentMemory() {
  const std::lock_guard lock(returns_->mutex);
  returns_->is_closed = true;
}

std::shared_ptr<const Loan> LentMemory::lend(std::size_t num_bytes) {
  take_returns();
  exchange_.all_gather(0);  // all have counted what they dropped
  free_unused();
  const std::size_t idx = choose_row();
  if (idx == kMaxSegments)
    throw std::invalid_argument("a group can share at most " + std::to_string(kMaxSegments) +
                                " tensors at a time; tensors that all ranks have released and no "
                                "graph has captured do not count");
  auto segment = group_.make_segment(std::max<std::size_t>(num_bytes, 1));
  agree(exchange_, attempt([&] {
          std::vector<std::byte*> bases;
          for (int rank = 0; rank < exchange_.world_size(); ++rank)
            bases.push_back(segment->of(rank));
          tell_kernels(idx, 0, bases);
        }));
  ++row(idx).num_users;
  exchange_.all_gather(0);  // no rank may treat the row as free before all have entered it
  if (entries_.size() <= idx) entries_.resize(idx + 1);
  entries_[idx].segment = std::move(segment);
  ++num_lent_;
  return std::make_shared<Loan>(group_.device(), idx, entries_[idx].segment->part(exchange_.rank()),
                                returns_);
}

// Rank 0 chooses the first row that no rank uses, or kMaxSegments.
std::size_t LentMemory::choose_row() {
  std::size_t free = 0;
  while (free < kMaxSegments && row(free).num_users != 0) ++free;
  if (exchange_.rank() == 0 && free < kMaxSegments) row(free).num_gone = 0;
  return exchange_.all_gather(free)[0];
}

void LentMemory::tell_kernels(std::size_t row, int first_rank,
                              const std::vector<std::byte*>& bases) {
  const auto world_size = static_cast<std::size_t>(exchange_.world_size());
  constexpr std::size_t kRows = kMaxSegments + PeerAllocations::kMaxRows;
  if (bases_ == nullptr)
    bases_ =
        std::make_unique<DeviceMemory>(group_.device(), kRows * world_size * sizeof(std::byte*));
  const MappedHostMemory& words = group_.words_for_copies();
  std::copy(bases.begin(), bases.end(), static_cast<std::byte**>(words.host()));
  const std::size_t first = row * world_size + static_cast<std::size_t>(first_rank);
  copy_and_wait(bases_->data() + first * sizeof(std::byte*), words.device(),
                bases.size() * sizeof(std::byte*), "tell kernels of shared memory");
}

void LentMemory::take_returns() {
  {
    const std::lock_guard lock(returns_->mutex);
    std::move(returns_->all.begin(), returns_->all.end(), std::back_inserter(returning_));
    returns_->all.clear();
  }
  if (returning_.empty()) return;
  const RelaxedCapture relaxed;
  std::erase_if(returning_, [&](const Loan::Return& returned) {
    Entry& entry = entries_[returned.row];
    if (returned.is_captured || entry.is_captured) return true;  // it stays
    for (const auto& end : returned.ends)
      if (!end->is_over()) return false;
    entry.is_gone = true;
    ++row(returned.row).num_gone;
    return true;
  });
}

// The driver counts the ranks that have a part mapped.
void LentMemory::free_unused() {
  const auto world_size = static_cast<std::uint32_t>(exchange_.world_size());
  for (std::size_t idx = 0; idx < entries_.size(); ++idx) {
    if (!entries_[idx].is_gone || row(idx).num_gone != world_size) continue;
    entries_[idx] = {};
    --num_lent_;
    --row(idx).num_users;
  }
}

void LentMemory::find_buffers(const Collective& call, const LaunchPlan& plan, Turn turn,
                              KernelCall& kernel_call) {
  if (num_lent_ > 0) {
    take_returns();
    free_unused();
  }
  // A replay uses all buffers of the call, lent or not.
  if (turn.is_captured) {
    for (int rank = 0; rank < kernel_call.world_size; ++rank) {
      keep_for_graph(kernel_call.inputs[rank]);
      keep_for_graph(kernel_call.outputs[rank]);
    }
    keep_for_graph(kernel_call.master);
    for (const auto* state : kernel_call.states) keep_for_graph(state);
  }
  find_lent_buffers(
      call, plan,
      [&](const std::byte* data, std::size_t num_bytes) -> std::uint64_t {
        if (const std::uint64_t place = place_in_segments(data, num_bytes); place != 0)
          return place;
        if (!maps_tensors_ || num_bytes < kMinMappedBytes) return 0;
        const PeerAllocations::Place found = allocations_.place_of(data, num_bytes, turn.number);
        return found.is_lent ? Lent::place(kMaxSegments + found.row, found.offset) : 0;
      },
      kernel_call);
  kernel_call.lent.bases =
      bases_ != nullptr ? reinterpret_cast<std::byte* const*>(bases_->data()) : nullptr;
  // A graph's kernel may meet one of a peer that lends by then: without bases it takes nothing.
  if (bases_ == nullptr) kernel_call.lends = Lends::kNo;
}

void LentMemory::keep_for_graph(const void* data) {
  if (const std::uint64_t place = place_in_segments(static_cast<const std::byte*>(data), 1);
      place != 0)
    entries_[(place >> Lent::kOffsetBits) - 1].is_captured = true;
}

std::uint64_t LentMemory::place_in_segments(const std::byte* data, std::size_t num_bytes) const {
  for (std::size_t idx = 0; idx < entries_.size() && num_lent_ > 0; ++idx) {
    const Entry& entry = entries_[idx];
    if (entry.segment == nullptr) continue;
    const DeviceMemory& own = *entry.segment->part(exchange_.rank());
    if (data < own.data() || data + num_bytes > own.data() + own.num_bytes()) continue;
    return Lent::place(idx, static_cast<std::uint64_t>(data - own.data()));
  }
  return 0;
}

}  // namespace ringcomm::cuda
