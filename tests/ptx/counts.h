#pragma once

#include <compare>
#include <map>
#include <memory>
#include <string>

#include "ptx/memory.h"

/// What a GPU would move for the accesses of kernels, by their addresses. Lanes of a warp count
/// together where they execute the same line of PTX equally often after a barrier. Their fibers
/// run one after the other; a GPU's lanes usually do it at once.
namespace ringcomm::ptx {

/// kLoad and kStore: weak accesses. kPacketLoad and kPacketStore: volatile ones, in which data and
/// its announcement are one. kPoll and kPublish: all other orders, of cursors and flags.
enum class Counted : u8 {
  kLoad,
  kStore,
  kBulkLoad,
  kBulkStore,
  kPacketLoad,
  kPacketStore,
  kPoll,
  kPublish,
  kSharedLoad,
  kSharedStore,
  kBarrier
};

struct Count {
  u64 num = 0;    ///< accesses of a warp; kPoll, kPublish: of a thread; kBarrier: of 256 threads
  u64 bytes = 0;  ///< that the lanes ask for; what several of them ask for counts once
  /// Of 32 bytes, in global memory; cycles of the 32 banks, in shared memory.
  u64 sectors = 0;
  /// Of full warps: bytes of their sectors that no lane asks for; cycles that bank conflicts add.
  u64 wasted = 0;

  Count& operator+=(const Count& other);
};

struct CountedLine {
  std::string kernel;
  u32 line = 0;
  Counted what = Counted::kLoad;

  auto operator<=>(const CountedLine&) const = default;
};
using Counts = std::map<CountedLine, Count>;

/// Blocks that begin between the two calls are counted. Their memory is strong.
void start_counting();
Counts stop_counting();
/// Of all lines and kernels.
Count total(const Counts& counts, Counted what);

/// Null unless accesses are counted.
std::unique_ptr<Memory> begin_counted_block(const Launch& launch);

}  // namespace ringcomm::ptx
