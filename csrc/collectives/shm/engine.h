#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "collectives/carrier.h"
#include "collectives/collective.h"
#include "collectives/shm/store_kind.h"
#include "collectives/trace.h"
#include "core/board_protocol.h"
#include "core/link_protocol.h"
#include "core/stop.h"
#include "reduce/reduce_op.h"
#include "transport/shm/group.h"
#include "transport/shm/host_arch.h"
#include "transport/shm/shared_arena.h"

namespace ringcomm {

/// A machine of the host whose waits are recorded.
class TracedArch final : public shm::HostArch {
 public:
  TracedArch(shm::WaitScope& scope, const shm::Group& group)
      : HostArch(scope, group.rank(), group.world_size()), group_(group) {}

  trace::Span record_wait(int peer) const {
    return trace::Span([&] {
      return trace::Event{.from = group_.whole_rank(peer),
                          .kind = trace::Kind::kWait,
                          .name = trace::name_number("wait")};
    });
  }
  Stop stopped(int peer) const {
    trace::note_alive();
    return HostArch::stopped(peer);
  }

 private:
  const shm::Group& group_;
};
static_assert(Arch<TracedArch>);

/// The locations of a rank's buffers in memory that its peers can map. Published with the call's
/// header, and not compared. A rank that publishes locations stages no data in its first phase.
struct BufferNote {
  shm::ArenaLocation input;
  shm::ArenaLocation output;

  bool is_given() const { return input.is_somewhere(); }
};

/// The state in which collectives of one group run, one after another, on one thread at a time.
///
/// Each collective starts with a board phase whose region begins with the call's header, and checks
/// every peer's header before it reads a byte of data. So every rank detects a different call, with
/// any algorithm and without an extra message: the header is in the line of the first data.
class Engine {
 public:
  using Arch = TracedArch;

  Engine(shm::Group& group, shm::WaitScope& scope)
      : group_(group), arch_(scope, group), board_(arch_, group.board(), group.rank()) {}

  int rank() const { return group_.rank(); }
  int world_size() const { return group_.world_size(); }
  const shm::Group& group() const { return group_; }
  Arch& arch() { return arch_; }

  /// Bytes of data that one phase can carry.
  std::size_t phase_bytes() const { return board_.region_bytes() - kHeaderBytes; }

  /// Starts a collective: its first phase will be one with headers.
  void begin() { are_headers_known_ = has_notes_ = false; }

  /// Opens the first phase of `header`'s collective: room for its first data.
  std::byte* open_first(const CallHeader& header);
  /// The data of `peer` in the first phase; throws Mismatched when it made another call.
  const std::byte* wait_first(int peer, const CallHeader& header);
  /// Whether a peer has staged no data in the first phase because its buffers are shared. A staged
  /// collective then returns without a result. Every rank sees the same notes, so all ranks
  /// continue in the same way (DirectCollectives).
  bool has_notes() const { return has_notes_; }
  /// The same for callers that compare the headers themselves.
  const std::byte* wait_header(int peer, CallHeader& theirs);

  /// A first phase that carries `note` and no data.
  void publish_note(const CallHeader& header, const BufferNote& note);
  /// The notes of all ranks; throws Mismatched. Afterwards the headers are known, and the next
  /// phase is an ordinary one.
  void read_notes(const CallHeader& header, const BufferNote& mine, BufferNote* notes);
  /// Ends the access to lent buffers; see Board.
  void rejoin() { check(board_.rejoin()); }

  /// The same for later phases.
  std::byte* open();
  const std::byte* wait(int peer);

  /// Publishes the filled region: all ranks may read it.
  void publish() { board_.publish(); }

  /// A first phase without data, for algorithms that do not use boards.
  void exchange_headers(const CallHeader& header);

  /// Stages `num_bytes` for peers with the kind of stores that fits this machine now.
  void stage(void* to, const void* from, std::size_t num_bytes);
  StoreKindChooser& store_kinds() { return store_kinds_; }
  /// Copies what a peer staged, or this rank's own share, into a result of `result_bytes` in all.
  void copy_result(void* to, const void* from, std::size_t num_bytes, std::size_t result_bytes);

  /// For what an algorithm stages or copies by itself.
  void count_copied(std::size_t num_bytes) { copied_bytes_ += num_bytes; }
  /// The bytes counted since the last call.
  std::uint64_t take_copied_bytes() { return std::exchange(copied_bytes_, 0); }

  /// Throws Stopped unless `stop` is kNone.
  static void check(Stop stop) {
    if (stop != Stop::kNone) throw Stopped{stop};
  }

 private:
  // The space of the header and the note before every region: whole lines, so that data is aligned
  // for any vector.
  static constexpr std::size_t kNoteOffsetBytes = kLineBytes;
  static constexpr std::size_t kHeaderBytes = 2 * kLineBytes;
  static_assert(sizeof(CallHeader) <= kNoteOffsetBytes);

  std::byte* open_with_header(const CallHeader& header, const BufferNote& note);
  BufferNote check_header(int peer, const std::byte* payload, const CallHeader& header) const;

  shm::Group& group_;
  Arch arch_;
  Board<Arch> board_;
  StoreKindChooser store_kinds_;
  std::uint64_t copied_bytes_ = 0;
  bool are_headers_known_ = false;
  bool has_notes_ = false;
};

}  // namespace ringcomm
