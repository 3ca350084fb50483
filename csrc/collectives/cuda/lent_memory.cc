#include "collectives/cuda/lent_memory.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

#include "core/errors.h"

namespace ringcomm::cuda {

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
    // The process is ending, and the driver has gone before: the memory goes with it.
  }
}

LentMemory::LentMemory(RecordExchange& exchange, DeviceGroup& group, std::byte* words)
    : exchange_(exchange),
      group_(group),
      rows_(reinterpret_cast<Row*>(words)),
      returns_(std::make_shared<Loan::Returns>()) {}

LentMemory::~LentMemory() {
  const std::lock_guard lock(returns_->mutex);
  returns_->is_closed = true;
}

std::shared_ptr<const Loan> LentMemory::lend(std::size_t num_bytes) {
  take_returns();
  close_unused();
  const std::size_t idx = choose_row();  // all ranks are here, and have closed what they could
  free_closed();
  Entry& entry = entries_[idx];
  auto segment = std::make_unique<Segment>(
      exchange_, group_.device(), group_.places(), group_.handle_kind(),
      std::max<std::size_t>(num_bytes, 1), group_.leaving(), group_.word());
  agree(exchange_, attempt([&] { tell_kernels(idx, *segment); }));
  __atomic_fetch_add(&row(idx).num_users, 1u, __ATOMIC_ACQ_REL);
  exchange_.all_gather(0);  // nobody takes the row for free that others have yet to enter
  entry.segment = std::move(segment);
  ++num_lent_;
  return std::make_shared<Loan>(group_.device(), idx, entry.segment->own(), returns_);
}

// Rank 0 says which: the first that no rank uses.
std::size_t LentMemory::choose_row() {
  std::size_t free = 0;
  while (free < kMaxSegments && __atomic_load_n(&row(free).num_users, __ATOMIC_ACQUIRE) != 0)
    ++free;
  if (exchange_.rank() == 0 && free < kMaxSegments)
    __atomic_store_n(&row(free).num_gone, 0u, __ATOMIC_RELEASE);
  const std::size_t chosen = exchange_.all_gather(free)[0];
  if (chosen == kMaxSegments)
    throw std::invalid_argument("a group shares " + std::to_string(kMaxSegments) +
                                " tensors at most at a time; those that all ranks have dropped, "
                                "and no graph has captured, do not count");
  return chosen;
}

void LentMemory::tell_kernels(std::size_t idx, const Segment& segment) {
  const auto world_size = static_cast<std::size_t>(exchange_.world_size());
  const std::size_t row_bytes = world_size * sizeof(std::byte*);
  if (bases_ == nullptr)
    bases_ =
        std::make_unique<DeviceMemory>(group_.device(), kMaxSegments * row_bytes, HandleKind::kIpc);
  if (base_row_ == nullptr)
    base_row_ = std::make_unique<MappedHostMemory>(group_.device(), row_bytes);
  for (std::size_t rank = 0; rank < world_size; ++rank)
    static_cast<std::byte**>(base_row_->host())[rank] = segment.of(static_cast<int>(rank));
  const SideStream stream;
  check(driver().memcpy_async(reinterpret_cast<DevicePtr>(bases_->data() + idx * row_bytes),
                              reinterpret_cast<DevicePtr>(base_row_->device()), row_bytes,
                              stream.get()),
        "tell kernels of shared memory");
  stream.finish();
}

void LentMemory::collect() {
  if (num_lent_ == 0) return;
  take_returns();
  // To close and to free memory of handles waits for all that the device does.
  if (num_gone_ == 0 || group_.handle_kind() == HandleKind::kIpc) return;
  close_unused();
  free_closed();
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
    ++num_gone_;
    __atomic_fetch_add(&row(returned.row).num_gone, 1u, __ATOMIC_ACQ_REL);
    return true;
  });
}

void LentMemory::close_unused() {
  const auto world_size = static_cast<std::uint32_t>(exchange_.world_size());
  for (std::size_t idx = 0; idx < kMaxSegments; ++idx) {
    Entry& entry = entries_[idx];
    if (!entry.is_gone || entry.has_closed) continue;
    if (__atomic_load_n(&row(idx).num_gone, __ATOMIC_ACQUIRE) != world_size) continue;
    entry.segment->close_others();
    entry.has_closed = true;
    __atomic_fetch_sub(&row(idx).num_users, 1u, __ATOMIC_ACQ_REL);
  }
}

void LentMemory::free_closed() {
  // Of memory by file descriptors the driver counts the users.
  const bool is_counted = group_.handle_kind() == HandleKind::kFd;
  for (std::size_t idx = 0; idx < kMaxSegments; ++idx) {
    Entry& entry = entries_[idx];
    if (!entry.has_closed) continue;
    if (!is_counted && __atomic_load_n(&row(idx).num_users, __ATOMIC_ACQUIRE) != 0) continue;
    group_.leaving().drop(entry.segment->own());
    entry = {};
    --num_lent_;
    --num_gone_;
  }
}

void LentMemory::find_buffers(const Collective& call, bool is_captured, KernelCall& kernel_call) {
  kernel_call.lent = {};
  kernel_call.lent_input = kernel_call.lent_output = 0;
  if (num_lent_ == 0) return;
  kernel_call.lent.bases = reinterpret_cast<std::byte* const*>(bases_->data());
  const std::uint64_t input = place_of(call.inputs[0], call.num_bytes(), is_captured);
  const std::uint64_t output = place_of(call.outputs[0], call.num_bytes(), is_captured);
  if (input == 0 || output == 0) return;
  kernel_call.lent_input = input;
  kernel_call.lent_output = output;
}

std::uint64_t LentMemory::place_of(const void* data, std::size_t num_bytes, bool is_captured) {
  const auto* begin = static_cast<const std::byte*>(data);
  for (std::size_t idx = 0; idx < kMaxSegments; ++idx) {
    Entry& entry = entries_[idx];
    if (entry.segment == nullptr) continue;
    const std::byte* base = entry.segment->of(exchange_.rank());
    if (begin < base || begin + num_bytes > base + entry.segment->num_bytes()) continue;
    entry.is_captured = entry.is_captured || is_captured;
    return cuda::Lent::place(idx, static_cast<std::uint64_t>(begin - base));
  }
  return 0;
}

}  // namespace ringcomm::cuda
