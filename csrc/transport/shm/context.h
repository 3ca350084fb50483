#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "collectives/collective.h"
#include "collectives/flight.h"
#include "collectives/trace.h"
#include "core/board_protocol.h"
#include "core/chunk_layout.h"
#include "host/group.h"
#include "host/host_arch.h"
#include "host/shared_arena.h"
#include "reduce/reduce_op.h"
#include "transport/transport.h"

namespace ringcomm {

/// A machine of the host whose waits are recorded. A wait reads the clock only after some pauses:
/// one that ends before is not long.
class TracedArch final : public shm::HostArch {
 public:
  TracedArch(shm::WaitScope& scope, const shm::Group& group)
      : HostArch(scope, group.rank(), group.world_size()), group_(group) {}

  class Wait {
   public:
    Wait(TracedArch& arch, int peer)
        : arch_(arch), peer_(peer), span_([&] {
            return trace::Event{.from = arch.group_.whole_rank(peer),
                                .kind = trace::Kind::kWait,
                                .name = trace::name_number("wait")};
          }) {
      arch.num_pauses_ = 0;
      arch.begin_ticks_ = 0;
    }
    ~Wait() {
      if (arch_.begin_ticks_ != 0) [[unlikely]]
        arch_.end_wait(peer_);
    }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    TracedArch& arch_;
    int peer_;
    trace::Span span_;
  };
  Wait record_wait(int peer) { return {*this, peer}; }
  /// Whether the next waits are for ranks to begin the collective.
  void set_arriving(bool is_arriving) { is_arriving_ = is_arriving; }

  void pause() {
    if (++num_pauses_ == kPausesWithoutClock) begin_ticks_ = flight::ticks();
    HostArch::pause();
  }
  Yielded yield() {
    start_clock();
    return HostArch::yield();
  }
  Stop stopped(int peer) {
    start_clock();
    trace::record_alive();
    return HostArch::stopped(peer);
  }

 private:
  static constexpr std::uint32_t kPausesWithoutClock = 64;  // 2 us

  void start_clock() {
    if (begin_ticks_ == 0) begin_ticks_ = flight::ticks();
  }
  void end_wait(int peer) const {
    if (const std::uint64_t waited = flight::long_wait_since(begin_ticks_); waited > 0)
      group_.record({group_.whole_rank(peer), waited, is_arriving_});
  }

  const shm::Group& group_;
  bool is_arriving_ = false;
  std::uint32_t num_pauses_ = 0;   // of the wait
  std::uint64_t begin_ticks_ = 0;  // of the wait; 0 until the clock is read
};
static_assert(Arch<TracedArch>);

/// The locations of a rank's buffers in memory that its peers can map. Published in the region of
/// the first phase, in place of data.
struct BufferHandle {
  shm::ArenaLocation input = {};
  shm::ArenaLocation output = {};

  bool is_given() const { return input.is_somewhere(); }
};

/// Chooses how staged bytes are stored: plain stores are 2 times faster if the cores of two ranks
/// share a cache, and otherwise 2 to 3 times slower (docs/experiments.md, "stores"). A virtual
/// machine switches between the two cases, and no counter shows it. So the collectives are timed,
/// by operation and size class. The first calls of a class try both kinds, the others use the
/// faster, until the time doubles or 512 calls are made. Rank 0 publishes the kind of the class's
/// next call in each call: a rank that tried alone would disturb the others' times.
class StoreKindChooser {
 public:
  /// Starts a collective of `num_bytes` per rank.
  void begin(OpKind op, std::size_t num_bytes);
  host::StoreKind kind() const { return kind_; }
  bool is_next_streaming() const { return class_ != nullptr && class_->is_next_streaming; }
  /// What rank 0 has published.
  void follow(bool is_next_streaming) {
    if (class_ != nullptr) class_->is_next_streaming = is_next_streaming;
  }
  /// Stops and continues the time of the collective: the wait for late ranks does not count.
  void pause() {
    if (class_ != nullptr) elapsed_ += Clock::now().time_since_epoch();
  }
  void resume() {
    if (class_ != nullptr) elapsed_ -= Clock::now().time_since_epoch();
  }
  void end() {
    pause();
    count(std::chrono::duration<float>(elapsed_).count());
  }
  void count(float seconds);

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr float kNever = std::numeric_limits<float>::infinity();

  // The shortest times, because the others include later waits.
  struct SizeClass {
    std::array<float, 2> best = {kNever, kNever};  // by StoreKind, since the last trial
    float recent_best = kNever;                    // of up to 64 calls
    std::uint32_t num_calls = 0;                   // since the last trial began
    bool is_next_streaming = false;
  };

  std::array<std::array<SizeClass, 16>, kNumOpKinds> classes_;  // powers of two from 16 KiB on
  SizeClass* class_ = nullptr;  // of the current collective, if its kind matters
  host::StoreKind kind_ = host::StoreKind::kCached;
  Clock::duration elapsed_{};
};

/// The state in which collectives of one group run, one after another, on one thread at a time.
///
/// Each collective starts with a board phase that publishes the call's header beside its cursor. A
/// rank checks every peer's header before it reads a byte of data. So every rank detects a
/// different call, with any algorithm and without an extra message or cache line.
class ShmContext {
 public:
  using Arch = TracedArch;

  ShmContext(shm::Group& group, shm::WaitScope& scope);

  int rank() const { return group_.rank(); }
  int world_size() const { return group_.world_size(); }
  const shm::Group& group() const { return group_; }
  CallStep& step() { return group_.step(); }
  Arch& arch() { return arch_; }

  /// Bytes of data that one phase can carry.
  std::size_t phase_bytes() const { return board_.region_bytes(); }

  /// Starts a collective: its first phase will carry the header, which must live until its end, and
  /// the handle.
  void begin(const CallHeader& header, const BufferHandle& handle = {});
  const CallHeader& header() const { return *header_; }

  /// Room for this rank's data of the next phase.
  std::byte* open();
  /// All ranks may read the opened region, or know that this rank has finished the phases before.
  /// In the first phase, waits for all headers, and throws Mismatched when a peer made another
  /// call. Returns false if a peer has staged no data because its buffers are shared. A staged
  /// collective then returns without a result. Every rank sees the same handles, so all ranks
  /// continue in the same way (ShmTransport::run_or_share).
  [[nodiscard]] bool publish();
  /// The data of `peer` in the published phase, or its shared input.
  const std::byte* wait(int peer);
  /// The header of a rank, while the first phase is the last that was published.
  CallHeader header_of(int rank);
  const BufferHandle& handle_of(int rank) const { return handles_[static_cast<std::size_t>(rank)]; }
  /// Whether any rank gave a handle.
  bool has_handles() const;
  /// Whether `rank` did, or every rank (-1).
  bool has_all_handles(int rank) const;

  /// Runs over `num_elems` elements, at most `max_elems` in a phase and at least one phase, because
  /// headers are exchanged even without data: `stage(piece)`, a publication, `take(piece)`. While
  /// inputs are shared, only `take()` of all, in no phase. A piece has `num_steps`.
  template <class Stage, class Take>
  void for_each_piece(std::size_t num_elems, std::size_t max_elems, const Stage& stage,
                      const Take& take, int num_steps = 1) {
    if (is_sharing()) {
      take(ElemRange{0, num_elems});
      return rejoin();
    }
    const std::size_t num_pieces = std::max<std::size_t>(1, num_slices(num_elems, max_elems));
    for (std::size_t idx = 0; idx < num_pieces; ++idx) {
      const ElemRange piece = slice_of({0, num_elems}, idx, max_elems);
      step() = {1, num_steps, idx + 1, num_pieces};
      stage(piece);
      if (!publish()) return;
      take(piece);
    }
  }

  /// From now on wait() gives the peers' own inputs of `num_bytes`, whose handles all ranks have
  /// read, until rejoin(); see Board.
  void share_inputs(std::size_t num_bytes) { shared_bytes_ = num_bytes; }
  bool is_sharing() const { return shared_bytes_ > 0; }
  /// The address here of a rank's shared buffer, `offset_bytes` behind its location.
  std::byte* find_shared(int rank, const shm::ArenaLocation& location, std::size_t offset_bytes,
                         std::size_t num_bytes);
  void rejoin() { check(board_.rejoin()); }

  /// Stages `num_bytes` for peers with the kind of stores that fits this machine now.
  void stage(void* to, const void* from, std::size_t num_bytes);
  StoreKindChooser& store_kinds() { return store_kinds_; }
  /// Copies what a peer staged, or this rank's own shard, into a result of `result_bytes` in all.
  void copy_result(void* to, const void* from, std::size_t num_bytes, std::size_t result_bytes);

  /// Room for a pointer for each rank.
  const void** sources() { return sources_.data(); }

  /// For what an algorithm stages or copies by itself.
  void count_copied(std::size_t num_bytes) { copied_bytes_ += num_bytes; }
  /// The bytes counted since the last call.
  std::uint64_t take_copied_bytes() { return std::exchange(copied_bytes_, 0); }

  /// Throws Stopped, with the rank that was waited for last, unless `stop` is kNone.
  void check(Stop stop) const {
    if (stop != Stop::kNone) throw Stopped{stop, scope_.awaited_peer()};
  }

 private:
  // What a rank publishes beside the cursor of the first phase: with it, it fits a line of 64 bytes
  // unless the call updates weights.
  struct HeaderLine {
    bool has_handle = false;
    bool is_next_streaming = false;  // of rank 0: the kind of stores in the next such call
    CallHeader header;

    std::size_t num_bytes() const { return offsetof(HeaderLine, header) + header.num_wire_bytes(); }
  };
  static_assert(sizeof(HeaderLine) <= sizeof(Cursor::beside));
  static_assert(sizeof(Cursor::value) + offsetof(HeaderLine, header) +
                    offsetof(CallHeader, update) <=
                64);

  HeaderLine header_line_of(int peer);

  // Of the first phase.
  enum class First : std::uint8_t { kClosed, kOpen, kOver };

  shm::Group& group_;
  const shm::WaitScope& scope_;
  Arch arch_;
  Board<Arch> board_;
  StoreKindChooser store_kinds_;
  std::uint64_t copied_bytes_ = 0;
  const CallHeader* header_ = nullptr;
  std::uint64_t num_calls_ = 0;  // of the group, with the one that runs
  First first_ = First::kOver;
  std::size_t shared_bytes_ = 0;  // of each rank's input; 0 where data is staged
  std::vector<const void*> sources_;
  std::vector<BufferHandle> handles_;                       // of the current call, by rank
  std::vector<std::shared_ptr<shm::PeerMemory>> memories_;  // by rank; null until needed
};

}  // namespace ringcomm
