#pragma once

#include <chrono>
#include <functional>

#include "collectives/p2p_op.h"

namespace ringcomm {

/// Point-to-point messages of one rank. Neither a send nor a receive blocks where it is issued.
/// All functions may be called from any thread.
class PointToPoint {
 public:
  using Clock = std::chrono::steady_clock;
  using Interrupted = std::function<bool()>;

  virtual ~PointToPoint() = default;

  /// Starts an operation; its buffer must live until it is done. Throws what ended the group, and
  /// std::invalid_argument where `peer` is no other rank.
  virtual void post(const P2pOpPtr& op) = 0;
  /// Returns true when the operation has ended (with or without an error), false if `deadline`
  /// passes before. `is_interrupted` is called about every 50 ms, true ends the group; may be
  /// empty.
  virtual bool wait(const P2pOpPtr& op, Clock::time_point deadline,
                    const Interrupted& is_interrupted) = 0;
  /// Call it before the destructor, after the last post. Returns when every send is received, its
  /// receiver has left, or its timeout has passed; ends the receives with an error.
  /// `is_interrupted` as in wait(). A second call does nothing.
  virtual void close(const Interrupted& is_interrupted) = 0;
};

}  // namespace ringcomm
