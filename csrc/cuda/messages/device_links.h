#pragma once

#include <ATen/Functions.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "collectives/ring.h"
#include "cuda/messages/backend_calls.h"

namespace ringcomm {

/// The links of an all_reduce by the ring of collectives/ring.h: batches of a send to the next rank
/// and a receive from the previous one. A batch is posted where its receive is expected, after the
/// sum that it sends is in the stream. Adds by torch's operators.
class DeviceLinks {
 public:
  DeviceLinks(BackendCalls& calls, const Collective& call, at::ScalarType type,
              const ShardTable& shards)
      : calls_(calls),
        reduction_(undivided(call.reduction)),
        type_(type),
        shards_(shards),
        schedule_(calls.rank(), calls.world_size()),
        slice_elems_(kSlotBytes / shards.element_bytes),
        received_(calls.stage(kNumSlots * kSlotBytes)),
        batches_(kNumSlots) {}

  const RingSchedule& schedule() const { return schedule_; }
  std::size_t depth() const { return kNumSlots; }
  std::size_t slice_elems() const { return slice_elems_; }
  std::size_t input_element_bytes() const { return shards_.element_bytes; }
  std::size_t output_element_bytes() const { return shards_.element_bytes; }
  const RingChunk& chunk(int rank) const { return shards_.of(rank); }

  void expect(const RingPart& part) {
    calls_.recv(part.is_gather ? part.output : place(part), part.input_bytes, schedule_.previous());
    batches_[slot_of(part)] = calls_.post();
  }

  void send(const RingPart& part) {
    calls_.send(part.is_gather ? part.output : part.input, part.input_bytes, schedule_.next());
  }

  void reduce(const RingPart& part) {
    calls_.wait(std::move(batches_[slot_of(part)]));
    if (part.num_elems > 0) add(part);
    if (part.is_sent) calls_.send(part.output, part.input_bytes, schedule_.next());
  }

  void copy(const RingPart& part) {
    calls_.wait(std::move(batches_[slot_of(part)]));
    if (part.is_sent) calls_.send(part.output, part.output_bytes, schedule_.next());
  }

 private:
  // Two slices are under way. Each costs several launches of kernels.
  static constexpr std::size_t kNumSlots = 2;
  static constexpr std::size_t kSlotBytes = std::size_t{4} << 20;

  std::size_t slot_of(const RingPart& part) const { return part.slice_idx % kNumSlots; }
  std::byte* place(const RingPart& part) const { return received_ + slot_of(part) * kSlotBytes; }

  void add(const RingPart& part) {
    const auto of = [&](const void* data) { return calls_.array(data, part.num_elems, type_); };
    at::Tensor sum = of(part.output);
    const at::Tensor received = of(place(part)), own = of(part.input);
    switch (reduction_) {
      case Reduction::kProduct:
        at::mul_out(sum, received, own);
        break;
      case Reduction::kMin:
        at::minimum_out(sum, received, own);
        break;
      case Reduction::kMax:
        at::maximum_out(sum, received, own);
        break;
      default:
        at::add_out(sum, received, own);
    }
    if (!part.is_last || shards_.divisor == 1) return;
    sum.is_floating_point() ? sum.div_(shards_.divisor) : sum.div_(shards_.divisor, "trunc");
  }

  BackendCalls& calls_;
  Reduction reduction_;
  at::ScalarType type_;
  const ShardTable& shards_;
  RingSchedule schedule_;
  std::size_t slice_elems_;
  std::byte* received_;
  std::vector<std::vector<BackendCalls::Work>> batches_;  // by slot
};

}  // namespace ringcomm
