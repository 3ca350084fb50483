#pragma once

// Ends the waits of tests that run protocols without a group.

#include <chrono>

#include "core/arch.h"
#include "host/host_arch.h"

namespace ringcomm::testing {

/// Waits end in half a minute: a lost wake-up or credit is a failure then and not a hang.
class Patience final : public WaitGuard {
 public:
  WaitStatus check(int) override {
    return std::chrono::steady_clock::now() < deadline_ ? WaitStatus::kNone : WaitStatus::kTimeout;
  }

 private:
  std::chrono::steady_clock::time_point deadline_ =
      std::chrono::steady_clock::now() + std::chrono::seconds(30);
};

/// Waits end by themselves only.
class NoStop final : public WaitGuard {
 public:
  WaitStatus check(int) override { return WaitStatus::kNone; }
};

/// No wait sleeps.
class Refusal final : public WaitGuard {
 public:
  explicit Refusal(WaitStatus why) : why_(why) {}
  WaitStatus check(int peer) override {
    last_peer_ = peer;
    return why_;
  }
  int last_peer() const { return last_peer_; }

 private:
  WaitStatus why_;
  int last_peer_ = -1;
};

}  // namespace ringcomm::testing
