#pragma once

#include <cstdint>

#include "core/annotations.h"

namespace ringcomm::cuda {

/// Words of a call's header, as kernels compare them: collectives/collective.h's CallHeader with
/// its number left out, filled up with zeros.
inline constexpr int kHeaderWords = 32;

/// The words by which a rank's kernels and its host communicate, in host memory that both map. One
/// for each rank of a group.
///
/// The host writes `abort`; kernels that see it stop waiting. The first block that fails fills in
/// the record, `stop` last; the host's watchdog reads it.
struct Control {
  std::uint32_t abort = 0;
  std::uint32_t stop = 0;  ///< a core Stop, or kMismatch; 0: nothing has happened
  std::int32_t peer = -1;  ///< the rank waited for, or that called something else
  std::uint64_t launch = 0;
  /// A wait that does not end immediately polls for `abort`, and stores here the rank that it waits
  /// for and the time of the poll, from a clock of its own. So the watchdog sees which kernels
  /// wait.
  std::int32_t awaited_peer = -1;
  std::uint32_t asked_at = 0;
  std::uint32_t theirs[kHeaderWords] = {};  ///< with kMismatch: the peer's header

  RINGCOMM_HD void note_wait(int peer_waited_for, std::uint32_t now) {
#ifdef __CUDA_ARCH__
    *static_cast<volatile std::int32_t*>(&awaited_peer) = peer_waited_for;
    *static_cast<volatile std::uint32_t*>(&asked_at) = now;
#else
    __atomic_store_n(&awaited_peer, peer_waited_for, __ATOMIC_RELAXED);
    __atomic_store_n(&asked_at, now, __ATOMIC_RELAXED);
#endif
  }
};

/// In Control::stop: a peer made another call.
inline constexpr std::uint32_t kMismatch = 100;
/// Two ranks, theirs[0] and theirs[1], disagree on how much the first has for the second: bytes as
/// two words each, the sender's and the receiver's.
inline constexpr std::uint32_t kSizesDiffer = 101;
/// A receive got a different message: its bytes as two words, its tag.
inline constexpr std::uint32_t kMailDiffers = 102;
/// Two kernels of this rank used the same part of its staging at a time.
inline constexpr std::uint32_t kOverlap = 103;

}  // namespace ringcomm::cuda
