#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"

namespace ringcomm {

/// Eight bytes of data with their flags: two 64-bit words, each with half of the data in its low
/// half and the call's number in its high half. A word is written and read atomically, so data with
/// the right number belongs to the call, and words need no order. Call n + 2 reuses the place of
/// call n, which the reader has read: the writer has its packets of n + 1, written after that.
struct alignas(16) Packet {
  std::uint64_t low;
  std::uint64_t high;
};

/// The flag of call `number`, which counts from 1. It is never zero, the content of fresh memory,
/// and never the flag of the call before last.
RINGCOMM_HD constexpr std::uint32_t packet_flag(std::uint64_t number) {
  return static_cast<std::uint32_t>(number % 0xffffffffu) + 1;
}

/// Which of the two places of a packet the call uses.
RINGCOMM_HD constexpr std::size_t packet_turn(std::uint64_t number) {
  return static_cast<std::size_t>(number % 2);
}

/// The number after a call. Peers may wait for packets of one that failed, so all later numbers of
/// this rank are ones whose flags no peer waits for.
RINGCOMM_HD constexpr std::uint64_t packets_after(std::uint64_t before, bool succeeded) {
  return succeeded ? before + 1 : before | std::uint64_t{1} << 63;
}

template <class A>
RINGCOMM_HD void put_packet(A& arch, Packet& packet, std::uint64_t data, std::uint32_t flag) {
  const std::uint64_t above = std::uint64_t{flag} << 32;
  arch.store_packet(packet, (data & 0xffffffffu) | above, (data >> 32) | above);
}

/// Extracts the data of a packet's words. False if one of them does not belong to the call.
RINGCOMM_HD constexpr bool open_packet(std::uint64_t low, std::uint64_t high, std::uint32_t flag,
                                       std::uint64_t& data) {
  if (low >> 32 != flag || high >> 32 != flag) return false;
  data = (low & 0xffffffffu) | (high << 32);
  return true;
}

}  // namespace ringcomm
