#pragma once

#include <cstddef>
#include <cstdint>

#include "collectives/carrier.h"
#include "collectives/collective.h"
#include "collectives/store_kind.h"
#include "core/board_protocol.h"
#include "core/link_protocol.h"
#include "core/stop.h"
#include "core/wait_policy.h"
#include "device/reduce_op.h"
#include "transport/shm/group.h"
#include "transport/shm/host_arch.h"

namespace ringcomm {

/// The state in which collectives of one group run, one after another, on one thread at a time.
///
/// Each collective starts with a board phase whose region begins with the call's header, and checks
/// every peer's header before it reads a byte of data. So a rank that called something else is
/// found by every rank, whatever the algorithms, with no message of its own: the header travels in
/// the line that carries the first data.
class Engine {
 public:
  using Arch = shm::HostArch;

  Engine(shm::Group& group, shm::WaitScope& scope)
      : group_(group), arch_(scope), board_(arch_, budget_, group.board(), group.rank()) {}

  int rank() const { return group_.rank(); }
  int world_size() const { return group_.world_size(); }
  const shm::Group& group() const { return group_; }
  Arch& arch() { return arch_; }
  SpinBudget& budget() { return budget_; }

  /// Bytes of data that one phase can carry.
  std::size_t phase_bytes() const { return board_.region_bytes() - kHeaderBytes; }

  /// Opens the first phase of `header`'s collective: room for its first data.
  std::byte* open_first(const CallHeader& header);
  /// The data of `peer` in the first phase; throws Mismatched when it made another call.
  const std::byte* wait_first(int peer, const CallHeader& header);

  /// The same for later phases.
  std::byte* open();
  const std::byte* wait(int peer);

  /// Ends filling: what was written is for all to read.
  void publish() { board_.publish(); }

  /// A first phase without data, for algorithms that do not use boards.
  void exchange_headers(const CallHeader& header);

  /// Stages `num_bytes` for peers with the kind of stores that fits this machine now.
  void stage(void* to, const void* from, std::size_t num_bytes);
  StoreKindChooser& store_kinds() { return store_kinds_; }

  /// Throws Stopped unless `stop` is kNone.
  static void check(Stop stop) {
    if (stop != Stop::kNone) throw Stopped{stop};
  }

 private:
  // The header's room in front of every region: two lines, so that data starts aligned for any
  // vector.
  static constexpr std::size_t kHeaderBytes = kLineBytes;
  static_assert(sizeof(CallHeader) <= kHeaderBytes);

  shm::Group& group_;
  Arch arch_;
  SpinBudget budget_;
  Board<Arch> board_;
  StoreKindChooser store_kinds_;
};

}  // namespace ringcomm
