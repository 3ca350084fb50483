#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "transport/process_generation.h"

namespace ringcomm {

/// One T for each process: created at the first use and never destroyed, because its users may
/// outlive any order of destruction. A forked child gets its own T; the parent's is left unchanged,
/// because another thread may have locked it during the fork.
///
/// For static variables with constant initialization.
template <class T>
class PerProcess {
 public:
  /// Makes it if need be. Throws what T's constructor does.
  T& get() {
    for (;;) {
      Made* made = made_.load(std::memory_order_acquire);
      if (is_mine(made)) return made->object;
      auto fresh = std::make_unique<Made>();
      if (made_.compare_exchange_strong(made, fresh.get(), std::memory_order_acq_rel))
        return fresh.release()->object;
    }
  }

  /// Null before the first get() of this process.
  T* find() const {
    Made* made = made_.load(std::memory_order_acquire);
    return is_mine(made) ? &made->object : nullptr;
  }

 private:
  struct Made {
    T object;
    int generation = process_generation();
  };

  static bool is_mine(const Made* made) {
    return made != nullptr && made->generation == process_generation();
  }

  std::atomic<Made*> made_ = nullptr;
};

}  // namespace ringcomm
