#pragma once

#include "cuda/kernels/phases.h"
#include "cuda/kernels/reducers.h"

// all_reduce of small buffers by packets: every rank puts the call's header and its data straight
// into every peer's memory, and reduces what arrives.

namespace ringcomm::cuda {

/// The digest of a header, which every rank compares, and the header, which is read if it differs.
inline constexpr int kHeaderPackets = 1 + kHeaderWords / 2;

/// Waits for one packet; each thread for its own.
template <Block B>
RINGCOMM_HD WaitStatus await_packet(B& block, const Packet& packet, std::uint32_t flag, int peer,
                                    std::uint64_t& data) {
  constexpr int kLooks = 1000;  // between two questions of whether to go on: they go to the host
  for (;;) {
    RINGCOMM_ROLLED
    for (int i = 0; i < kLooks; ++i) {
      if (take_packet(block, packet, flag, data)) return WaitStatus::kNone;
      block.pause();
    }
    if (const WaitStatus stop = block.stopped(peer); stop != WaitStatus::kNone) return stop;
  }
}

RINGCOMM_HD inline std::uint64_t header_data(const KernelCall& call, std::size_t packet) {
  if (packet == 0) return call.header_digest;
  return call.header[2 * (packet - 1)] | std::uint64_t{call.header[2 * (packet - 1) + 1]} << 32;
}

/// A block's part. Item i of its work is to compare the digest of rank i's header, item world_size
/// + i to reduce packet i: all digests have arrived before anything is stored.
template <class Reducer, Block B>
class OneShot {
 public:
  RINGCOMM_HD OneShot(B& block, const KernelCall& call)
      : block_(block),
        call_(call),
        reducer_(call.dtype, call.reduction),
        number_(*reinterpret_cast<std::uint64_t*>(
            call.staging.of[call.rank] +
            call.staging.layout.packet_calls_offset(block.block_idx()))),
        calls_before_(number_),  // no other block's, and of this rank alone
        flag_(packet_flag(calls_before_ + 1)),
        turn_(static_cast<std::uint32_t>(packet_turn(calls_before_ + 1))),
        num_bytes_(call.num_elems * reducer_.elem_bytes()) {
    const std::size_t all_packets = (num_bytes_ + kWordBytes - 1) / kWordBytes;
    const std::size_t most = call.staging.layout.packets_per_block - kHeaderPackets;
    begin_ = block.block_idx() * most;
    if (begin_ < all_packets)
      num_packets_ = all_packets - begin_ < most ? all_packets - begin_ : most;
    put_all();
  }

  RINGCOMM_HD WaitStatus run() {
    const auto num_ranks = static_cast<std::size_t>(call_.world_size);
    const std::size_t num_items = num_ranks + num_packets_;
    WaitStatus last = WaitStatus::kNone;
    RINGCOMM_ROLLED
    for (std::size_t first = 0; first < num_items; first += block_.num_threads()) {
      const std::size_t item = first + block_.thread_idx();
      WaitStatus stop = WaitStatus::kNone;
      std::uint64_t result = 0;
      if (item < num_ranks)
        stop = compare_digest(static_cast<int>(item));
      else if (item < num_items)
        stop = reduce(item - num_ranks, result);
      if (first < num_ranks) stop = block_.agree(stop);
      last = stop;
      if (stop != WaitStatus::kNone) break;
      if (item >= num_ranks && item < num_items)
        store_word(call_.outputs[0], begin_ + item - num_ranks, num_bytes_, result);
    }
    if (num_items > block_.num_threads()) last = block_.agree(last);
    if (block_.thread_idx() == 0) number_ = packets_after(calls_before_, last == WaitStatus::kNone);
    return last;
  }

 private:
  /// The packets of this block from `from` to `to`.
  RINGCOMM_HD Packet* places(int to, int from) const {
    const Staging& staging = call_.staging;
    return reinterpret_cast<Packet*>(
        staging.of[to] +
        staging.layout.packets_offset(block_.block_idx(), turn_, static_cast<std::uint32_t>(from)));
  }

  RINGCOMM_HD void put_all() {
    RINGCOMM_ROLLED
    for (std::size_t i = block_.thread_idx(); i < kHeaderPackets + num_packets_;
         i += block_.num_threads()) {
      const std::uint64_t data =
          i < kHeaderPackets ? header_data(call_, i)
                             : load_word(call_.inputs[0], begin_ + i - kHeaderPackets, num_bytes_);
      RINGCOMM_ROLLED
      for (int distance = 1; distance < call_.world_size; ++distance) {
        const int peer = (call_.rank + distance) % call_.world_size;
        put_packet(block_, places(peer, call_.rank)[i], data, flag_);
      }
    }
  }

  /// A thread that finds a different call reports it to the host at once, which ends the other
  /// threads' waits for data that may never arrive.
  RINGCOMM_HD WaitStatus compare_digest(int rank) {
    if (rank == call_.rank) return WaitStatus::kNone;
    const Packet* packets = places(call_.rank, rank);
    std::uint64_t data = 0;
    const WaitStatus stop = await_packet(block_, packets[0], flag_, rank, data);
    if (stop != WaitStatus::kNone || data == call_.header_digest) return stop;
    tell_alone(block_, call_, kMismatch, rank, [&](int word) {
      std::uint64_t words = 0;
      const WaitStatus is_late = await_packet(block_, packets[1 + word / 2], flag_, rank, words);
      return is_late == WaitStatus::kNone ? static_cast<std::uint32_t>(words >> (word % 2 * 32))
                                          : 0;
    });
    return WaitStatus::kAborted;
  }

  /// Loads the packets of several ranks together, and waits for those that have not arrived.
  RINGCOMM_HD WaitStatus reduce(std::size_t packet, std::uint64_t& result) {
    constexpr int kAtOnce = 4;
    typename Reducer::Word acc = {};
    RINGCOMM_ROLLED
    for (int first = 0; first < call_.world_size; first += kAtOnce) {
      std::uint64_t low[kAtOnce];
      std::uint64_t high[kAtOnce];
      RINGCOMM_UNROLL
      for (int s = 0; s < kAtOnce; ++s) {
        // Instead of ranks that there are not, the last one again.
        const int rank = first + s < call_.world_size ? first + s : call_.world_size - 1;
        block_.load_packet(place(rank, packet), low[s], high[s]);
      }
      RINGCOMM_UNROLL
      for (int s = 0; s < kAtOnce; ++s) {
        const int rank = first + s;
        if (rank >= call_.world_size) break;
        std::uint64_t data = 0;
        if (rank == call_.rank) {
          data = load_word(call_.inputs[0], begin_ + packet, num_bytes_);
        } else if (!open_packet(low[s], high[s], flag_, data)) {
          const WaitStatus stop = await_packet(block_, place(rank, packet), flag_, rank, data);
          if (stop != WaitStatus::kNone) return stop;
        }
        if (rank == 0)
          acc = reducer_.first(data);
        else
          reducer_.add(acc, data);
      }
    }
    result = reducer_.result(acc, call_.divisor);
    return WaitStatus::kNone;
  }
  RINGCOMM_HD const Packet& place(int rank, std::size_t packet) const {
    return places(call_.rank, rank)[kHeaderPackets + packet];
  }

  B& block_;
  const KernelCall& call_;
  Reducer reducer_;
  std::uint64_t& number_;
  std::uint64_t calls_before_;
  std::uint32_t flag_;
  std::uint32_t turn_;
  std::size_t num_bytes_;
  std::size_t begin_ = 0;
  std::size_t num_packets_ = 0;
};

template <class Reducer, Block B>
RINGCOMM_HD void all_reduce_one_shot(B& block, const KernelCall& call) {
  run_collective<OneShot<Reducer, B>>(block, call);
}

}  // namespace ringcomm::cuda
