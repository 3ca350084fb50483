#include "transport/shm/store_kind_chooser.h"

#include <algorithm>
#include <bit>

namespace ringcomm {

void StoreKindChooser::begin(OpKind op, std::size_t num_bytes) {
  class_ = nullptr;
  kind_ = host::StoreKind::kCached;
  const auto width = static_cast<std::size_t>(std::bit_width(num_bytes >> 14));
  if (width == 0) return;  // it is over before its lines have left the cache
  auto& classes = classes_[static_cast<std::size_t>(op)];
  class_ = &classes[std::min(width, classes.size()) - 1];
  if (class_->is_next_streaming) kind_ = host::StoreKind::kStreaming;
  // 512: when the cores come to share a cache, the time of streaming stores hardly changes.
  auto& [best, recent_best, num_calls, is_next] = *class_;
  const bool is_look = num_calls % 64 == 0;
  if (num_calls == 512 || (is_look && recent_best > 2 * std::ranges::min(best))) *class_ = {};
  if (is_look) recent_best = kNever;
  const std::uint32_t idx = num_calls++;
  is_next = idx >= 3 && (idx < 7 || best[1] < best[0]);
  elapsed_ = {};
  resume();
}

void StoreKindChooser::count(float seconds) {
  if (class_ == nullptr) return;
  float& best = class_->best[kind_ == host::StoreKind::kStreaming ? 1 : 0];
  best = std::min(best, seconds);
  class_->recent_best = std::min(class_->recent_best, seconds);
}

}  // namespace ringcomm
