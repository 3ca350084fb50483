#include "cuda/collectives/lent_memory.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>

#include "core/chunk_layout.h"
#include "core/errors.h"

namespace ringcomm::cuda {
namespace {

// The driver allocates pieces of this size.
constexpr std::size_t kPieceBytes = std::size_t{2} << 20;
constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();  // longer than any piece

}  // namespace

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
    : exchange_(exchange), group_(group), returns_(std::make_shared<Loan::Returns>()) {}

LentMemory::~LentMemory() {
  const std::lock_guard lock(returns_->mutex);
  returns_->is_closed = true;
}

std::shared_ptr<const Loan> LentMemory::lend(std::size_t num_bytes) {
  const std::size_t idx = make_room();
  if (idx == kMaxSegments)
    throw std::invalid_argument("a group can share at most " + std::to_string(kMaxSegments) +
                                " tensors at a time; tensors that all ranks have released and no "
                                "graph has captured do not count");
  return lend_in(idx, num_bytes);
}

std::shared_ptr<const Loan> LentMemory::borrow(std::size_t num_bytes, const StreamPlace& place) {
  take_returns();
  const std::size_t mine = find_kept(num_bytes, place.capture != 0);
  const auto found = exchange_.all_gather(mine != kMaxSegments ? 1 : 0);
  if (std::all_of(found.begin(), found.end(), [](std::uint64_t has) { return has != 0; })) {
    Entry& entry = entries_[mine];
    for (const auto& end : entry.ends)
      if (place.capture == 0) end->block(place.stream);
    entry.ends.clear();
    entry.is_free = false;
    entry.is_captured |= place.capture != 0;
    return std::make_shared<Loan>(group_.device(), mine, entry.segment->own(), returns_);
  }
  drop_kept(num_bytes);
  const std::size_t idx = make_room();
  if (idx == kMaxSegments) return nullptr;
  try {
    auto loan =
        lend_in(idx, num_slices(std::max<std::size_t>(num_bytes, 1), kPieceBytes) * kPieceBytes);
    entries_[idx].is_kept = true;
    entries_[idx].is_captured = place.capture != 0;
    return loan;
  } catch (const Unavailable&) {  // on all ranks: one of their GPUs has no memory left
    drop_kept(kAll);
    return nullptr;
  }
}

// A row for all ranks; kMaxSegments if there is none, also without what waits to be borrowed.
std::size_t LentMemory::make_room() {
  for (const bool is_last : {false, true}) {
    take_returns();
    if (is_last) exchange_.all_gather(0);  // all have counted what they dropped
    free_unused();
    const std::size_t idx = choose_row();
    if (idx < kMaxSegments || is_last) return idx;
    drop_kept(kAll);
  }
  return kMaxSegments;
}

bool LentMemory::has_all_parts(std::size_t idx) const { return row(idx).num_gone == 0; }

// Among kept parts that fit and are less than twice as long, the one that was returned first. A
// capture cannot wait for work outside it.
std::size_t LentMemory::find_kept(std::size_t num_bytes, bool is_captured) const {
  std::size_t found = kMaxSegments;
  for (std::size_t idx = 0; idx < entries_.size(); ++idx) {
    const Entry& entry = entries_[idx];
    if (!entry.is_free || !has_all_parts(idx)) continue;
    const std::size_t there = entry.segment->num_bytes();
    if (there < num_bytes || (there > kPieceBytes && there / 2 >= num_bytes)) continue;
    if (is_captured && !std::all_of(entry.ends.begin(), entry.ends.end(),
                                    [](const auto& end) { return end->is_over(); }))
      continue;
    if (found == kMaxSegments || entry.freed_at < entries_[found].freed_at) found = idx;
  }
  return found;
}

// Drops parts that are too short, and those of which another rank has dropped its own. Keeps those
// that are too long; otherwise calls that alternate between sizes would allocate each time.
void LentMemory::drop_kept(std::size_t num_bytes) {
  for (std::size_t idx = 0; idx < entries_.size(); ++idx) {
    Entry& entry = entries_[idx];
    if (!entry.is_free) continue;
    if (entry.segment->num_bytes() >= num_bytes && has_all_parts(idx)) continue;
    entry.is_kept = entry.is_free = false;
    returning_.push_back({.row = idx, .is_captured = false, .ends = std::move(entry.ends)});
  }
}

std::shared_ptr<const Loan> LentMemory::lend_in(std::size_t idx, std::size_t num_bytes) {
  auto segment = group_.make_segment(std::max<std::size_t>(num_bytes, 1));
  agree(exchange_, attempt([&] { tell_kernels(idx, *segment); }));
  ++row(idx).num_users;
  exchange_.all_gather(0);  // no rank may treat the row as free before all have entered it
  if (entries_.size() <= idx) entries_.resize(idx + 1);
  entries_[idx].segment = std::move(segment);
  ++num_lent_;
  return std::make_shared<Loan>(group_.device(), idx, entries_[idx].segment->own(), returns_);
}

// Rank 0 chooses the first row that no rank uses, or kMaxSegments.
std::size_t LentMemory::choose_row() {
  std::size_t free = 0;
  while (free < kMaxSegments && row(free).num_users != 0) ++free;
  if (exchange_.rank() == 0 && free < kMaxSegments) row(free).num_gone = 0;
  return exchange_.all_gather(free)[0];
}

void LentMemory::tell_kernels(std::size_t idx, const Segment& segment) {
  const auto world_size = static_cast<std::size_t>(exchange_.world_size());
  const std::size_t row_bytes = world_size * sizeof(std::byte*);
  if (bases_ == nullptr)
    bases_ =
        std::make_unique<DeviceMemory>(group_.device(), kMaxSegments * row_bytes, HandleKind::kIpc);
  const MappedHostMemory& words = group_.words_for_copies();
  for (std::size_t rank = 0; rank < world_size; ++rank)
    static_cast<std::byte**>(words.host())[rank] = segment.of(static_cast<int>(rank));
  copy_and_wait(bases_->data() + idx * row_bytes, words.device(), row_bytes,
                "tell kernels of shared memory");
}

void LentMemory::collect() {
  if (num_lent_ == 0) return;
  drop_kept(0);  // a peer may have dropped its part after this rank kept its own
  take_returns();
  free_unused();
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
    if (entry.is_kept && has_all_parts(returned.row)) {
      entry.is_free = true;
      entry.ends = returned.ends;
      entry.freed_at = num_returned_++;
      return true;
    }
    entry.is_kept = false;
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

void LentMemory::find_buffers(const Collective& call, const LaunchPlan& plan, bool is_captured,
                              KernelCall& kernel_call) {
  kernel_call.lent.bases =
      bases_ != nullptr ? reinterpret_cast<std::byte* const*>(bases_->data()) : nullptr;
  // A replay uses all buffers of the call, lent or not.
  if (is_captured) {
    for (int rank = 0; rank < kernel_call.world_size; ++rank) {
      keep_for_graph(kernel_call.inputs[rank]);
      keep_for_graph(kernel_call.outputs[rank]);
    }
    keep_for_graph(kernel_call.master);
    for (const auto* state : kernel_call.states) keep_for_graph(state);
  }
  find_lent_buffers(
      call, plan,
      [this](const std::byte* data, std::size_t num_bytes) { return place_of(data, num_bytes); },
      kernel_call);
  // A graph's kernel may meet one of a peer that lends by then: without bases it takes nothing.
  if (bases_ == nullptr) kernel_call.lends = Lends::kNo;
}

void LentMemory::keep_for_graph(const void* data) {
  if (const std::uint64_t place = place_of(static_cast<const std::byte*>(data), 1); place != 0)
    entries_[(place >> Lent::kOffsetBits) - 1].is_captured = true;
}

std::uint64_t LentMemory::place_of(const std::byte* data, std::size_t num_bytes) const {
  for (std::size_t idx = 0; idx < entries_.size() && num_lent_ > 0; ++idx) {
    const Entry& entry = entries_[idx];
    if (entry.segment == nullptr) continue;
    const std::byte* base = entry.segment->of(exchange_.rank());
    if (data < base || data + num_bytes > base + entry.segment->num_bytes()) continue;
    return Lent::place(idx, static_cast<std::uint64_t>(data - base));
  }
  return 0;
}

}  // namespace ringcomm::cuda
