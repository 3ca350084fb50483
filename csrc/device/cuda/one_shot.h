#pragma once

#include "device/cuda/combine.h"
#include "device/cuda/phases.h"

// all_reduce of small buffers by packets: every rank puts its data, with the call's header in
// front, straight into every peer's memory, and reduces what arrives.

namespace ringcomm::cuda {

inline constexpr int kHeaderPackets = kHeaderWords / 2;
inline constexpr std::size_t kPacketBytes = 8;  ///< of data

/// The packets of a block from and to each rank, in the call of which this is the number.
struct PacketPlaces {
  const KernelCall& call;
  unsigned block;
  std::size_t turn;

  /// Where this rank finds, or `to` will find, what `from` has put there.
  RINGCOMM_HD Packet* at(int to, int from) const {
    const Staging& staging = call.staging;
    return reinterpret_cast<Packet*>(
        staging.of[to] +
        staging.layout.packets_offset(block, turn, static_cast<std::size_t>(from)));
  }
};

/// Eight bytes of an array of `num_bytes`, filled up with zeros where it ends before.
RINGCOMM_HD inline std::uint64_t load_data(const std::byte* from, std::size_t idx,
                                           std::size_t num_bytes) {
  const std::size_t begin = idx * kPacketBytes;
  std::uint64_t data = 0;
  if (begin + kPacketBytes <= num_bytes && is_aligned(from, kPacketBytes))
    return reinterpret_cast<const std::uint64_t*>(from)[idx];
  for (std::size_t i = 0; i < kPacketBytes && begin + i < num_bytes; ++i)
    data |= static_cast<std::uint64_t>(from[begin + i]) << (8 * i);
  return data;
}
RINGCOMM_HD inline void store_data(std::byte* to, std::size_t idx, std::size_t num_bytes,
                                   std::uint64_t data) {
  const std::size_t begin = idx * kPacketBytes;
  if (begin + kPacketBytes <= num_bytes && is_aligned(to, kPacketBytes)) {
    reinterpret_cast<std::uint64_t*>(to)[idx] = data;
    return;
  }
  for (std::size_t i = 0; i < kPacketBytes && begin + i < num_bytes; ++i)
    to[begin + i] = static_cast<std::byte>(data >> (8 * i));
}

/// The elements of eight bytes, combined with others, or divided.
template <class Element, class Operator>
RINGCOMM_HD void add_data(typename Element::Acc* acc, std::uint64_t data, bool is_first) {
  constexpr int kElems = kPacketBytes / sizeof(typename Element::Stored);
  const auto pack = bits_as<Pack<Element, kElems>>(data);
  for (int e = 0; e < kElems; ++e) {
    const typename Element::Acc next = Element::load(pack.of[e]);
    acc[e] = is_first ? next : Operator::apply(acc[e], next);
  }
}
template <class Element>
RINGCOMM_HD std::uint64_t result_data(const typename Element::Acc* acc, int divisor) {
  constexpr int kElems = kPacketBytes / sizeof(typename Element::Stored);
  Pack<Element, kElems> pack;
  for (int e = 0; e < kElems; ++e)
    pack.of[e] = Element::store(divisor > 1 ? Element::divide(acc[e], divisor) : acc[e]);
  return bits_as<std::uint64_t>(pack);
}

/// Waits for one packet. Each thread waits for its own, so each finds its own reason to stop.
template <Block B>
RINGCOMM_HD Stop await_packet(B& block, const Packet& packet, std::uint32_t flag, int peer,
                              std::uint64_t& data) {
  constexpr int kLooks = 1000;  // between two questions of whether to go on: they go to the host
  for (;;) {
    for (int i = 0; i < kLooks; ++i) {
      if (take_packet(block, packet, flag, data)) return Stop::kNone;
      block.pause();
    }
    if (const Stop stop = block.stopped(peer); stop != Stop::kNone) return stop;
  }
}

/// What the threads of a block found, as one answer; in a time-out all of them name one rank that
/// some of them waited for.
template <Block B>
RINGCOMM_HD Stop agreed(B& block, const KernelCall& call, Stop stop) {
  if (!block.any(stop == Stop::kTimeout))
    return block.any(stop != Stop::kNone) ? Stop::kAborted : Stop::kNone;
  for (int peer = 0; peer < call.world_size; ++peer)
    if (block.any(stop == Stop::kTimeout && block.awaited_peer() == peer)) {
      block.note_awaited(peer);
      break;
    }
  return Stop::kTimeout;
}

template <class Element, class Operator, Block B>
RINGCOMM_HD Stop reduce_packets(B& block, const KernelCall& call, const PacketPlaces& places,
                                std::uint32_t flag, std::size_t begin, std::size_t num_packets) {
  const std::size_t num_bytes = call.num_elems * sizeof(typename Element::Stored);
  for (std::size_t i = block.thread_idx(); i < num_packets; i += block.num_threads()) {
    typename Element::Acc acc[kPacketBytes / sizeof(typename Element::Stored)] = {};
    for (int rank = 0; rank < call.world_size; ++rank) {
      std::uint64_t data = 0;
      if (rank == call.rank) {
        data = load_data(call.inputs[0], begin + i, num_bytes);
      } else {
        const Packet& packet = places.at(call.rank, rank)[kHeaderPackets + i];
        if (const Stop stop = await_packet(block, packet, flag, rank, data); stop != Stop::kNone)
          return stop;
      }
      add_data<Element, Operator>(acc, data, rank == 0);
    }
    store_data(call.outputs[0], begin + i, num_bytes, result_data<Element>(acc, call.divisor));
  }
  return Stop::kNone;
}

RINGCOMM_HD inline std::uint64_t header_data(const KernelCall& call, std::size_t packet) {
  return call.header[2 * packet] | std::uint64_t{call.header[2 * packet + 1]} << 32;
}

/// Waits for all peers' headers, and compares them with this rank's.
template <Block B>
RINGCOMM_HD Stop check_packet_headers(B& block, const KernelCall& call, const PacketPlaces& places,
                                      std::uint32_t flag) {
  Stop stop = Stop::kNone;
  bool differs = false;
  const auto num_packets = static_cast<std::size_t>(call.world_size) * kHeaderPackets;
  for (std::size_t i = block.thread_idx(); i < num_packets && stop == Stop::kNone;
       i += block.num_threads()) {
    const auto rank = static_cast<int>(i / kHeaderPackets);
    if (rank == call.rank) continue;
    std::uint64_t data = 0;
    stop = await_packet(block, places.at(call.rank, rank)[i % kHeaderPackets], flag, rank, data);
    differs = differs || (stop == Stop::kNone && data != header_data(call, i % kHeaderPackets));
  }
  stop = agreed(block, call, stop);
  if (stop != Stop::kNone || !block.any(differs)) return stop;
  for (int rank = 0; rank < call.world_size; ++rank) {
    std::uint32_t theirs[kHeaderWords] = {};
    bool is_same = true;
    for (std::size_t i = 0; rank != call.rank && i < kHeaderPackets; ++i) {
      std::uint64_t data = 0;
      take_packet(block, places.at(call.rank, rank)[i], flag, data);
      is_same = is_same && data == header_data(call, i);
      theirs[2 * i] = static_cast<std::uint32_t>(data);
      theirs[2 * i + 1] = static_cast<std::uint32_t>(data >> 32);
    }
    if (is_same) continue;
    tell(block, call, kMismatch, rank, theirs);
    break;
  }
  return Stop::kAborted;
}

template <class Element, Block B>
RINGCOMM_HD void all_reduce_one_shot(B& block, const KernelCall& call) {
  const StagingLayout& layout = call.staging.layout;
  std::uint32_t& busy = call.staging.busy(call.rank, block.block_idx());
  begin(block, call, busy);
  auto& number = *reinterpret_cast<std::uint64_t*>(call.staging.of[call.rank] +
                                                   layout.packet_calls_offset(block.block_idx()));
  const std::uint64_t calls_before = number;  // no other block's, and of this rank alone
  const std::uint32_t flag = packet_flag(calls_before + 1);
  const PacketPlaces places{call, block.block_idx(), packet_turn(calls_before + 1)};

  const std::size_t num_bytes = call.num_elems * sizeof(typename Element::Stored);
  const std::size_t all_packets = (num_bytes + kPacketBytes - 1) / kPacketBytes;
  const std::size_t most = layout.packets_per_block - kHeaderPackets;
  const std::size_t begin = block.block_idx() * most;
  const std::size_t num_packets =
      begin >= all_packets ? 0 : (all_packets - begin < most ? all_packets - begin : most);

  const std::size_t with_header = kHeaderPackets + num_packets;
  for (std::size_t i = block.thread_idx(); i < with_header; i += block.num_threads()) {
    const std::uint64_t data =
        i < kHeaderPackets ? header_data(call, i)
                           : load_data(call.inputs[0], begin + i - kHeaderPackets, num_bytes);
    for (int distance = 1; distance < call.world_size; ++distance) {
      const int peer = (call.rank + distance) % call.world_size;
      put_packet(block, places.at(peer, call.rank)[i], data, flag);
    }
  }
  Stop stop = check_packet_headers(block, call, places, flag);
  if (stop == Stop::kNone) {
    with_operator<Element>(call.reduction, [&](auto op) {
      stop = reduce_packets<Element, decltype(op)>(block, call, places, flag, begin, num_packets);
    });
    stop = agreed(block, call, stop);
  }
  if (stop == Stop::kNone && block.thread_idx() == 0) number = calls_before + 1;
  finish(block, call, stop);
  end(block, busy);
}

}  // namespace ringcomm::cuda
