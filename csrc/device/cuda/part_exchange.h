#pragma once

#include "device/cuda/loss_call.h"
#include "device/cuda/one_shot.h"

namespace ringcomm::cuda {

/// The packets by which a cluster of this rank and the same cluster of the peers exchange one
/// LossPart per number.
template <Block W>
class PartExchange {
 public:
  RINGCOMM_HD PartExchange(W& waiter, const KernelCall& call, unsigned cluster)
      : waiter_(waiter),
        call_(call),
        cluster_(cluster),
        number_(*reinterpret_cast<std::uint64_t*>(
            call.staging.of[call.rank] + call.staging.layout.packet_calls_offset(cluster))),
        before_(number_) {}

  /// Writes the header next to the call's first part.
  RINGCOMM_HD void put_header() {
    const std::uint32_t flag = packet_flag(before_ + 1);
    RINGCOMM_ROLLED
    for (int i = thread_idx(); i < kHeaderPackets; i += num_threads())
      put_to_all(places(before_ + 1), i, header_data(call_, static_cast<std::size_t>(i)), flag);
  }
  /// Whether all ranks made this call. Called by all threads.
  RINGCOMM_HD Stop compare_headers() {
    Stop stop = Stop::kNone;
    RINGCOMM_ROLLED
    for (int rank = thread_idx(); rank < call_.world_size && stop == Stop::kNone;
         rank += num_threads())
      stop = compare_digest(waiter_, call_, places(before_ + 1), packet_flag(before_ + 1), rank);
    return waiter_.agree(stop);
  }

  /// Sends this rank's part to all peers; the numbers of a call count from 1.
  RINGCOMM_HD void put(std::uint64_t idx, const LossPart& part) {
    const std::uint64_t number = before_ + idx;
    RINGCOMM_ROLLED
    for (int half = thread_idx(); half < 2; half += num_threads())
      put_to_all(places(number), first_packet(number) + half, half_of(part, half),
                 packet_flag(number));
  }
  /// Waits for all peers' parts; `own` is this rank's. All threads get the same answer.
  RINGCOMM_HD Stop take(std::uint64_t idx, const LossPart& own, LossPart* parts) {
    const std::uint64_t number = before_ + idx;
    Stop stop = Stop::kNone;
    RINGCOMM_ROLLED
    for (int i = thread_idx(); i < 2 * call_.world_size && stop == Stop::kNone;
         i += num_threads()) {
      const int rank = i / 2, half = i % 2;
      std::uint64_t data = half_of(own, half);
      if (rank != call_.rank)
        stop =
            await_packet(waiter_, places(number).at(call_.rank, rank)[first_packet(number) + half],
                         packet_flag(number), rank, data);
      __builtin_memcpy(reinterpret_cast<std::byte*>(&parts[rank]) + half * sizeof data, &data,
                       sizeof data);
    }
    return waiter_.agree(stop);
  }
  /// Ends the call after `num_used` numbers.
  RINGCOMM_HD void end(std::uint64_t num_used, Stop stop) {
    if (thread_idx() == 0) number_ = packets_after(before_, num_used, stop == Stop::kNone);
  }

 private:
  RINGCOMM_HD int thread_idx() const { return static_cast<int>(waiter_.thread_idx()); }
  RINGCOMM_HD int num_threads() const { return static_cast<int>(waiter_.num_threads()); }
  RINGCOMM_HD PacketPlaces places(std::uint64_t number) const {
    return {call_, cluster_, static_cast<std::uint32_t>(packet_turn(number))};
  }
  /// The packets after the header.
  RINGCOMM_HD static int first_packet(std::uint64_t number) {
    return kHeaderPackets + 2 * static_cast<int>(packet_half(number));
  }
  RINGCOMM_HD static std::uint64_t half_of(const LossPart& part, int half) {
    const float low = half == 0 ? part.max : part.total;
    const float high = half == 0 ? part.sum : part.target;
    return bits_as<std::uint32_t>(low) | std::uint64_t{bits_as<std::uint32_t>(high)} << 32;
  }
  RINGCOMM_HD void put_to_all(const PacketPlaces& places, int packet, std::uint64_t data,
                              std::uint32_t flag) {
    RINGCOMM_ROLLED
    for (int distance = 1; distance < call_.world_size; ++distance) {
      const int peer = (call_.rank + distance) % call_.world_size;
      put_packet(waiter_, places.at(peer, call_.rank)[packet], data, flag);
    }
  }

  W& waiter_;
  const KernelCall& call_;
  unsigned cluster_;
  std::uint64_t& number_;
  std::uint64_t before_;
};

}  // namespace ringcomm::cuda
