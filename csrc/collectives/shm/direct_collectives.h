#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "collectives/collective.h"
#include "collectives/shm/engine.h"
#include "transport/shm/shared_arena.h"

namespace ringcomm {

/// Collectives without staging, on buffers that all ranks can access directly (SharedArena).
///
/// Ranks do not know whether the peers' buffers are shared, so the first phase tells: a rank with
/// shared buffers adds a note to its header and stages no data. All ranks read all notes and make
/// the same decision. If all buffers are shared, the collective runs on them; if some are, it is
/// staged from the second phase on; if none are, it has run as usual. docs/design/shared_buffers.md
class DirectCollectives {
 public:
  /// `algorithm` is the group's, for all_reduce.
  DirectCollectives(Engine& engine, Algorithm algorithm);

  /// Runs the call directly, or by `staged()`. Returns the bytes that peers consume from this rank.
  /// Throws Stopped, Mismatched, Error.
  template <class Staged>
  std::uint64_t run(const Collective& call, const CallHeader& header, const Staged& staged) {
    was_direct_ = false;
    engine_.begin();
    const BufferNote mine = note_of(call);
    if (!mine.is_given()) {
      const std::uint64_t sent_bytes = staged();
      if (!engine_.has_notes()) return sent_bytes;
    }
    if (!agree(call, header, mine)) return staged();
    was_direct_ = true;
    return run_directly(call);
  }

  bool was_direct() const { return was_direct_; }

 private:
  BufferNote note_of(const Collective& call) const;
  bool agree(const Collective& call, const CallHeader& header, const BufferNote& mine);
  std::uint64_t run_directly(const Collective& call);
  std::uint64_t all_reduce(const Collective& call);
  std::uint64_t reduce_scatter(const Collective& call);
  std::uint64_t all_gather(const Collective& call);
  std::uint64_t broadcast(const Collective& call);

  std::byte* locate(int rank, const shm::ArenaLocation& location, std::size_t num_bytes);
  void check_not_aborted();
  void retire(const BufferNote& note) const;

  Engine& engine_;
  Algorithm algorithm_;
  bool was_direct_ = false;
  std::vector<BufferNote> notes_;                           // of the current call, by rank
  std::vector<std::shared_ptr<shm::PeerMemory>> memories_;  // by rank; null until needed
};

}  // namespace ringcomm
