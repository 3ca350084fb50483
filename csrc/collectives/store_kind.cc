#include "collectives/store_kind.h"

#include <algorithm>
#include <bit>

namespace ringcomm {

using host::StoreKind;

void StoreKindChooser::begin(std::size_t num_bytes) {
  timed_ = nullptr;
  kind_ = StoreKind::kCached;
  if (num_bytes < kMinBytes) return;
  const auto class_idx =
      std::min<std::size_t>(std::bit_width(num_bytes / kMinBytes) - 1, kNumClasses - 1);
  timed_ = &classes_[class_idx];
  is_probe_ = timed_->is_probe_due;
  const bool is_streaming = timed_->prefers_streaming != is_probe_;
  kind_ = is_streaming ? StoreKind::kStreaming : StoreKind::kCached;
  begin_ = Clock::now();
}

void StoreKindChooser::end() {
  if (timed_ == nullptr) return;
  record(*timed_, std::chrono::duration<float, std::micro>(Clock::now() - begin_).count());
}

void StoreKindChooser::record(SizeClass& size_class, float elapsed_us) {
  float& mean_us = size_class.mean_us[static_cast<std::size_t>(kind_)];
  const float usual_us = mean_us;
  // A probe speaks for itself: what the other kind took a second ago may be another machine's
  // figure.
  mean_us = is_probe_ || usual_us == 0 ? elapsed_us : usual_us + (elapsed_us - usual_us) / 4;
  if (is_probe_) {
    size_class.num_since_probe = 0;
    size_class.is_probe_due = false;
    const float kept_us = size_class.mean_us[size_class.prefers_streaming ? 1 : 0];
    if (kept_us > 0 && elapsed_us < kept_us)
      size_class.prefers_streaming = !size_class.prefers_streaming;
    return;
  }
  const bool is_suspicious =
      usual_us > 0 && elapsed_us > kSuspicious * usual_us && size_class.num_since_probe > 2;
  size_class.is_probe_due = ++size_class.num_since_probe >= kProbeEvery || is_suspicious;
}

}  // namespace ringcomm
