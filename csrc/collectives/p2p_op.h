#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>

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

}  // namespace ringcomm
