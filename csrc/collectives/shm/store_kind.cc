#include "collectives/shm/store_kind.h"

#include <algorithm>
#include <bit>

namespace ringcomm {

using host::StoreKind;

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

}  // namespace ringcomm
