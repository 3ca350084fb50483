#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"

namespace ringcomm {

/// Eight bytes of data with their flags: two words of 64 bits, each with a half of the data below
/// and the call's number above.
///
/// A word is written and read whole, so data that comes with the right number is the call's: small
/// messages need no other hand-over than their own arrival, and no order between words. Each pair
/// of ranks has two places per packet, used in turn. A place of call n is written again in call n
/// + 2. By then its reader has finished call n: the writer has ended call n + 1, for which it
/// needed the reader's packets of n + 1, and those were written after the reader had ended n.
struct alignas(16) Packet {
  std::uint64_t low;
  std::uint64_t high;
};

/// What stands above the data of call `number`, from 1 on: never zero, which is what fresh memory
/// holds, and never that of the call before last.
RINGCOMM_HD constexpr std::uint32_t packet_flag(std::uint64_t number) {
  return static_cast<std::uint32_t>(number % 0xffffffffu) + 1;
}

/// Which of the two places of a packet the call uses.
RINGCOMM_HD constexpr std::size_t packet_turn(std::uint64_t number) {
  return static_cast<std::size_t>(number % 2);
}

/// A call of many rows uses a number for each, and half of the place's packets: which half. In turn
/// t a rank puts number t before it takes the peers' t - 1, so that hand-overs are hidden; what it
/// puts over is number t - 4. It has taken the peers' t - 2, which they put after they had taken t
/// - 4. In front of the rows and behind them it takes what it puts at once: what comes before and
/// after such a call uses whole places.
RINGCOMM_HD constexpr std::size_t packet_half(std::uint64_t number) {
  return static_cast<std::size_t>(number / 2 % 2);
}

template <class A>
RINGCOMM_HD void put_packet(A& arch, Packet& packet, std::uint64_t data, std::uint32_t flag) {
  const std::uint64_t above = std::uint64_t{flag} << 32;
  arch.store_packet(packet, (data & 0xffffffffu) | above, (data >> 32) | above);
}

/// The data of a packet's words; false where one of them is not the call's.
RINGCOMM_HD constexpr bool open_packet(std::uint64_t low, std::uint64_t high, std::uint32_t flag,
                                       std::uint64_t& data) {
  if (low >> 32 != flag || high >> 32 != flag) return false;
  data = (low & 0xffffffffu) | (high << 32);
  return true;
}

/// False while it has not arrived whole.
template <class A>
RINGCOMM_HD bool take_packet(A& arch, const Packet& packet, std::uint32_t flag,
                             std::uint64_t& data) {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  arch.load_packet(packet, low, high);
  return open_packet(low, high, flag, data);
}

}  // namespace ringcomm
