#include "transport/shm/store_kind_chooser.h"

#include <algorithm>
#include <bit>

namespace ringcomm {

// Calls in a row before the class is measured again: fewer come by chance beside other programs.
constexpr int kMaxDoubled = 4;
// Calls for each try of the other kind, which takes up to 3 times the median: 0.05 %.
constexpr int kCallsPerTry = 4096;

// The first decides, as what disturbs a call only adds to its time.
std::array<StoreKindChooser::Clock::duration, 3> StoreKindChooser::SizeClass::sorted(
    std::size_t first) const {
  std::array three = {times[first], times[first + 1], times[first + 2]};
  std::ranges::sort(three);
  return three;
}

void StoreKindChooser::begin(OpKind op, std::size_t num_bytes) {
  class_ = nullptr;
  kind_ = cpu::StoreKind::kCached;
  const auto width = static_cast<std::size_t>(std::bit_width(num_bytes >> 14));
  if (width == 0) return;  // it is over before its lines have left the cache
  auto& classes = classes_[static_cast<std::size_t>(op)];
  class_ = &classes[std::min(width, classes.size()) - 1];
  if (class_->is_next_streaming) kind_ = cpu::StoreKind::kStreaming;
  if (class_->num_times < class_->times.size()) {
    class_->is_next_streaming = class_->num_times >= 4;
  } else {
    const bool is_try_next = class_->num_kept == kCallsPerTry - 2;
    class_->is_next_streaming = (class_->sorted(5)[0] < class_->sorted(2)[0]) != is_try_next;
  }
  elapsed_ = {};
  resume();
}

void StoreKindChooser::end() {
  if (class_ == nullptr) return;
  pause();
  SizeClass& it = *class_;
  if (it.num_times < it.times.size()) {
    it.times[it.num_times++] = elapsed_;
    return;
  }
  const Clock::duration kept_median = std::min(it.sorted(2)[1], it.sorted(5)[1]);
  if (++it.num_kept == kCallsPerTry) {
    it.num_kept = 0;
    if (elapsed_ < kept_median) it.measure_again();
    return;
  }
  it.num_doubled = elapsed_ > 2 * kept_median ? it.num_doubled + 1 : 0;
  if (it.num_doubled == kMaxDoubled) it.measure_again();
}

}  // namespace ringcomm
