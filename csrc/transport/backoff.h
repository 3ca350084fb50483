#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace ringcomm {

/// Sleeps between two looks at something that other processes change: longer each time, up to
/// 50 ms.
class Backoff {
 public:
  void sleep() {
    std::this_thread::sleep_for(pause_);
    pause_ = std::min<std::chrono::microseconds>(2 * pause_, std::chrono::milliseconds(50));
  }
  void reset() { pause_ = kFirst; }

 private:
  static constexpr std::chrono::microseconds kFirst{200};

  std::chrono::microseconds pause_ = kFirst;
};

}  // namespace ringcomm
