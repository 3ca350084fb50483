#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "cuda/collectives/launch_plan.h"

namespace ringcomm::cuda {

/// A buffer of this rank, and its place: 0 where peers have not mapped it.
struct PeerBuffer {
  const std::byte* data = nullptr;
  std::uint64_t num_bytes = 0;
  Place place = 0;
};

/// The launches of a call of LaunchKind::kInPlace or kRing. Peers access this rank's buffers where
/// they are, or, where they have not mapped them, in its scratch memory: it copies them there
/// before the first rendezvous, or from there after the last, piece by piece. If no rank does so,
/// the first piece is the whole call, and the other launches end at once.
class InPlaceLaunch {
 public:
  /// Both outlive it. The places of its buffers are to be found.
  InPlaceLaunch(const Collective& call, const LaunchPlan& plan, KernelCall& kernel_call);

  /// Each rank's part of the inputs, then of the outputs; those that no peer accesses are empty.
  std::vector<PeerBuffer>& buffers() { return buffers_; }
  bool is_staged() const { return is_staged(0) || is_staged(num_parts()); }

  enum class Step : std::uint8_t { kCopyIn, kOpen, kBody, kClose, kCopyOut };
  using Launch = std::function<void(Step step, KernelCall& kernel_call)>;
  /// `launch` is called in the order of the call's stream.
  void run(const Launch& launch);

 private:
  std::size_t num_parts() const { return buffers_.size() / 2; }
  bool is_staged(std::size_t first) const;
  Place place_of(std::size_t idx, bool is_staged, std::uint64_t in_scratch, std::size_t unit) const;

  const LaunchPlan& plan_;
  KernelCall& call_;
  bool lends_inputs_;
  std::vector<PeerBuffer> buffers_;
};

}  // namespace ringcomm::cuda
