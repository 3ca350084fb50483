#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "core/arch.h"
#include "core/wait_policy.h"

namespace ringcomm {

/// The memory layout of the boards of a group that shares one mapping; the same on every rank. Each
/// rank has two cursors and two regions, for even and for odd phases.
struct BoardGeometry {
  int world_size = 0;
  std::byte* cursors = nullptr;  ///< `cursor_stride_bytes` apart
  std::size_t cursor_stride_bytes = sizeof(Cursor);
  std::byte* regions = nullptr;  ///< `region_stride_bytes` apart
  std::size_t region_stride_bytes = 0;
  std::size_t region_bytes = 0;
  std::size_t num_shifts = 1;  ///< rank r begins (5 r mod num_shifts) lines later

  static constexpr bool kHasCopies = false;
  Cursor& cursor(int /*reader*/, int writer, std::uint64_t phase) const {
    return *reinterpret_cast<Cursor*>(cursors + place(writer, phase, cursor_stride_bytes));
  }
  std::byte* region(int rank, std::uint64_t phase) const {
    return regions + place(rank, phase, region_stride_bytes);
  }

 private:
  std::size_t place(int rank, std::uint64_t phase, std::size_t stride_bytes) const {
    const auto idx = static_cast<std::size_t>(rank);
    return (2 * idx + phase % 2) * stride_bytes + 5 * idx % num_shifts * kLineBytes;
  }
};

/// The boards of a group, seen from one rank: one writer each, read by all peers.
///
/// Collectives on boards are a sequence of phases that every rank runs through in the same order.
/// In phase k a rank may fill its own region k % 2, publishes, waits for the peers it needs and
/// reads their regions k % 2. Its cursor of phase k is set to k + 1, the number of phases that it
/// has published, which also shows what it has finished reading:
///
///   cursor of phase k of q >= k + 1   q's region of phase k may be read
///   cursor of phase k - 1 of q >= k   q has finished reading phase k - 2: region k % 2 is free
///
/// No other credit is needed, and each byte is written once, regardless of the number of readers. A
/// phase in which a rank writes nothing needs no open(): it publishes to say that it has finished
/// the phases before.
///
/// A rank may lend its own buffers to its peers. Peers may access them from the publication that
/// announces the loan until their own next publication. So a rank calls rejoin() before it returns
/// a lent buffer to its caller.
///
/// A geometry has world_size, region_bytes, region(rank, phase), and cursor(reader, writer, phase):
/// where the reader finds what the writer has published. With kHasCopies each reader has its own
/// copy in memory close to it, one for all phases, and a publication stores to every copy; without,
/// all readers share one, and cursors alternate with the phases like regions. What is published
/// beside a cursor then stays until its next phase but one is open.
template <Arch A, class Geometry = BoardGeometry>
class Board {
 public:
  RINGCOMM_HD Board(A& arch, const Geometry& geometry, int rank)
      : arch_(arch),
        geometry_(geometry),
        rank_(rank),
        phase_(arch.load_acquire(geometry.cursor(rank, rank, 0).value)) {
    if constexpr (!Geometry::kHasCopies) {
      const std::uint64_t odd = arch.load_acquire(geometry.cursor(rank, rank, 1).value);
      if (odd > phase_) phase_ = odd;
    }
  }

  /// How many phases this rank has published.
  RINGCOMM_HD std::uint64_t phase() const { return phase_; }

  RINGCOMM_HD std::size_t region_bytes() const { return geometry_.region_bytes; }

  /// Waits until this rank's region of the next phase may be filled, and returns it.
  RINGCOMM_HD WaitStatus open(std::byte*& region) {
    region = geometry_.region(rank_, phase_);
    return wait_all();
  }

  /// What `rank` publishes beside its cursor: this rank, after open(), of the next phase; others,
  /// after wait(), of the last.
  RINGCOMM_HD std::byte* payload(int rank) const {
    return geometry_.cursor(rank_, rank, rank == rank_ ? phase_ : phase_ - 1).payload;
  }

  /// Ends the previous phases and starts reading the next one. The filled region is visible to all.
  RINGCOMM_HD void publish() {
    ++phase_;
    if constexpr (Geometry::kHasCopies)
      advance_each(
          arch_, geometry_.world_size,
          [&](int reader) -> Cursor& { return geometry_.cursor(reader, rank_, phase_ - 1); },
          phase_);
    else
      advance(arch_, geometry_.cursor(rank_, rank_, phase_ - 1), phase_);
  }

  /// Waits for `peer` in the last published phase, and returns its region for reading.
  RINGCOMM_HD WaitStatus wait(int peer, const std::byte*& region) {
    const WaitStatus stop = wait_at_least(arch_, cursor_of(peer), phase_, peer);
    if (stop != WaitStatus::kNone) return stop;
    region = geometry_.region(peer, phase_ - 1);
    return WaitStatus::kNone;
  }

  /// Waits for all peers in the last published phase.
  RINGCOMM_HD WaitStatus wait_all() {
    return wait_all_at_least(
        arch_, geometry_.world_size, rank_, [&](int peer) -> Cursor& { return cursor_of(peer); },
        phase_);
  }

  /// Publishes a phase without data and waits for all peers. Afterwards no peer accesses a buffer
  /// that was lent before, and what peers wrote to it is visible.
  RINGCOMM_HD WaitStatus rejoin() {
    publish();
    return wait_all();
  }

 private:
  /// Where this rank finds that `peer` has published the last phase.
  RINGCOMM_HD Cursor& cursor_of(int peer) const {
    return geometry_.cursor(rank_, peer, phase_ - 1);
  }

  A& arch_;
  Geometry geometry_;
  int rank_;
  std::uint64_t phase_;
};

}  // namespace ringcomm
