#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>

#include "collectives/failure.h"

namespace ringcomm {

/// A message on its way, as its sender or its receiver sees it.
struct P2pOp {
  enum class Kind : std::uint8_t { kSend, kRecv };

  Kind kind = Kind::kSend;
  int peer = -1;        ///< the other rank; of a receive from any source -1 until it is matched
  int asked_peer = -1;  ///< what it was at first, for a recording
  std::uint64_t tag = 0;
  std::byte* data = nullptr;  ///< only read by a send
  std::size_t num_bytes = 0;
  std::chrono::milliseconds timeout{0};
  /// Called once, on any thread and without locks, when `is_done` has become true.
  std::function<void()> done = {};

  std::chrono::steady_clock::time_point deadline = {};
  std::size_t moved_bytes = 0;
  bool is_done = false;
  std::exception_ptr error = {};
};
using P2pOpPtr = std::shared_ptr<P2pOp>;

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

/// The same messages, recorded; `group` is the recording's number of the group.
std::unique_ptr<PointToPoint> traced(std::unique_ptr<PointToPoint> messages, std::uint32_t group);

// ---- errors of all carriers

/// "recv from rank 2 (tag 6, 44 bytes)"
Activity activity_of(const P2pOp& op);
/// Throws std::invalid_argument unless the operation's peer is another rank of the group, or any.
void check_peer(const P2pOp& op, int rank, int world_size);
/// A message of `sent_bytes` matched a receive of another size on `rank`: ends the group.
[[noreturn]] void raise_misfit(Failure& failure, const P2pOp& receive, std::uint64_t sent_bytes,
                               int rank);
/// The error of an operation whose group is destroyed.
std::exception_ptr orphaned(const P2pOp& op, int rank);

}  // namespace ringcomm
