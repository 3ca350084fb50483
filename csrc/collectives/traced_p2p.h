#pragma once

#include <cstdint>
#include <memory>

#include "collectives/point_to_point.h"

namespace ringcomm {

/// The messages of another PointToPoint, recorded. Exists only while something is recorded, so that
/// messages cost nothing more otherwise.
class TracedP2p final : public PointToPoint {
 public:
  /// `group` is the recording's number of the group.
  TracedP2p(std::unique_ptr<PointToPoint> messages, std::uint32_t group)
      : messages_(std::move(messages)), group_(group) {}

  void post(const P2pOpPtr& op) override;
  bool wait(const P2pOpPtr& op, Clock::time_point deadline,
            const Interrupted& is_interrupted) override;
  void close(const Interrupted& is_interrupted) override { messages_->close(is_interrupted); }

 private:
  std::unique_ptr<PointToPoint> messages_;
  std::uint32_t group_;
};

}  // namespace ringcomm
