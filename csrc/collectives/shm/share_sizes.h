#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/collective.h"
#include "collectives/shm/engine.h"

namespace ringcomm {

/// How many elements each rank has for each other one, in a collective in which that may differ.
///
/// A rank knows only its own sizes, and a mismatch is between two ranks. So every rank publishes
/// its sizes in the first phase, before the data: a table of one 64-bit count per rank (two tables
/// in all_to_all: sizes to send and to receive), or nothing if the header's num_elems is
/// sufficient. Every rank then compares all pairs, so all ranks fail with the same message and need
/// not notify each other.
///
/// The room for the tables is there even where they are not filled: ranks with even and with uneven
/// shares may be of one call, and must agree on where data begins.
class ShareSizes {
 public:
  ShareSizes(Engine& engine, const Collective& call, const CallHeader& header);

  /// Bytes of data in the first phase after the tables.
  std::size_t phase_bytes() const { return engine_.phase_bytes() - tables_bytes_; }
  /// Opens the first phase: room for its first data.
  std::byte* open_first();
  /// Waits for all ranks' sizes, after this rank has published its own. Throws Mismatched.
  void exchange();
  /// The data of `peer` in the first phase, after exchange().
  const std::byte* first_data(int peer) const { return tables_of(peer) + tables_bytes_; }

  /// Elements that `from` has for `to`. Before exchange() of this rank's own only.
  std::size_t elems(int from, int to) const { return elems_[index(from, to)]; }

 private:
  std::size_t index(int from, int to) const {
    return static_cast<std::size_t>(from) * static_cast<std::size_t>(engine_.world_size()) +
           static_cast<std::size_t>(to);
  }
  const std::byte* tables_of(int peer) const { return regions_[static_cast<std::size_t>(peer)]; }
  std::size_t told(int rank, std::size_t entry) const;
  std::size_t given(int from, int to) const;
  std::size_t expected(int from, int to) const;
  [[noreturn]] void throw_mismatch(int from, int to) const;

  Engine& engine_;
  const Collective& call_;
  const CallHeader& header_;
  std::size_t tables_bytes_;
  std::vector<std::size_t> elems_;         // by index()
  std::vector<CallHeader> headers_;        // by rank
  std::vector<const std::byte*> regions_;  // by rank: the region after the header
};

}  // namespace ringcomm
