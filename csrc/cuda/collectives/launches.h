#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cuda/collectives/launch_plan.h"
#include "cuda/driver/driver.h"

namespace ringcomm::cuda {

/// The kernels of this process on a device: loaded with the first group that uses it, and kept.
/// From any thread. of() throws Error where there are none or the device is too old for them.
class Kernels : public PerDevice<Kernels> {
 public:
  /// `call` is the kernel's parameter; its device's context is current. Throws Error if there is no
  /// kernel of this name.
  void launch(std::string_view name, unsigned num_blocks, GroupFrame& call,
              StreamHandle stream) const;

 private:
  friend PerDevice;
  explicit Kernels(DeviceOrdinal device);

  std::unordered_map<std::string_view, Function> functions_;
};

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
  /// Bytes that peers cannot access where they are.
  std::uint64_t staged_bytes() const { return staged_bytes(0) + staged_bytes(num_parts()); }

  using Launch =
      std::function<void(std::string_view kernel, unsigned num_blocks, KernelCall& kernel_call)>;
  /// `launch` is called in the order of the call's stream.
  void run(const Launch& launch);

 private:
  std::size_t num_parts() const { return buffers_.size() / 2; }
  std::uint64_t staged_bytes(std::size_t first) const;
  Place place_of(std::size_t idx, bool is_staged, std::uint64_t in_scratch, std::size_t unit) const;

  const LaunchPlan& plan_;
  KernelCall& call_;
  bool lends_inputs_;
  std::vector<PeerBuffer> buffers_;
};

/// Takes the messages of one launch out of at most P2pCall::kMaxMessages; sets the call's messages
/// and channels: those of a channel up to the eighth that is longer than a slot. False if none are
/// left.
bool take_launch(std::vector<P2pMessage>& messages, P2pCall& call);
/// This rank's messages in a call of LaunchKind::kShards.
std::vector<P2pMessage> shards_of(const Collective& call, const KernelCall& kernel_call);

}  // namespace ringcomm::cuda
