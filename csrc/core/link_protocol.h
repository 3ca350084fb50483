#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "core/arch.h"
#include "core/wait_policy.h"

namespace ringcomm {

/// A link: a FIFO of slots from one rank to another, with credits. Slot `n % num_slots` belongs to
/// the sender from the moment `n - head < num_slots` until it publishes tail = n + 1; from then on
/// to the receiver, until that publishes head = n + 1. Only its owner accesses it. A link needs two
/// slots: with one, a ring of ranks that receive and send at once would deadlock.
struct LinkCursors {
  Cursor tail;  ///< slots filled, written by the sender only
  Cursor head;  ///< slots drained, written by the receiver only
};

/// The memory layout of a link; the same on both ends.
struct LinkGeometry {
  Cursor* tail = nullptr;
  Cursor* head = nullptr;
  std::byte* slots = nullptr;
  std::uint32_t num_slots = 0;
  std::size_t slot_bytes = 0;
};

/// The current slot of a link. It advances without a division, which GPUs have no instruction for.
class SlotTurn {
 public:
  RINGCOMM_HD SlotTurn(const LinkGeometry& geometry, std::uint64_t n)
      : idx_(static_cast<std::uint32_t>(n % geometry.num_slots)) {}
  RINGCOMM_HD std::byte* slot(const LinkGeometry& geometry) const {
    return geometry.slots + idx_ * geometry.slot_bytes;
  }
  RINGCOMM_HD void move_on(const LinkGeometry& geometry) {
    idx_ = idx_ + 1 == geometry.num_slots ? 0 : idx_ + 1;
  }

 private:
  std::uint32_t idx_;
};

/// The sending end. One thread at a time; fill the slot that acquire() gives, then publish().
template <Arch A>
class SendLink {
 public:
  RINGCOMM_HD SendLink(A& arch, const LinkGeometry& geometry, int peer)
      : arch_(arch),
        geometry_(geometry),
        peer_(peer),
        tail_(arch.load_acquire(geometry.tail->value)),
        turn_(geometry, tail_) {}

  /// Waits until the next slot is free and returns it.
  RINGCOMM_HD WaitStatus acquire(std::byte*& slot) {
    if (const WaitStatus stop = wait_drained(geometry_.num_slots - 1); stop != WaitStatus::kNone)
      return stop;
    slot = turn_.slot(geometry_);
    return WaitStatus::kNone;
  }

  /// acquire() that does not wait: false when no slot is free.
  RINGCOMM_HD bool try_acquire(std::byte*& slot) {
    if (tail_ - arch_.load_acquire(geometry_.head->value) >= geometry_.num_slots) return false;
    slot = turn_.slot(geometry_);
    return true;
  }

  /// Hands the filled slot to the receiver.
  RINGCOMM_HD void publish() {
    turn_.move_on(geometry_);
    advance(arch_, *geometry_.tail, ++tail_);
  }

  /// Waits until at most `max_in_flight` slots are filled and not yet drained; with 0 the link is
  /// empty, and its geometry may be changed by both ends.
  RINGCOMM_HD WaitStatus wait_drained(std::uint64_t max_in_flight) {
    if (tail_ <= max_in_flight) return WaitStatus::kNone;
    return wait_at_least(arch_, *geometry_.head, tail_ - max_in_flight, peer_);
  }

 private:
  A& arch_;
  LinkGeometry geometry_;
  int peer_;
  std::uint64_t tail_;
  SlotTurn turn_;
};

/// The receiving end. One thread at a time; read the slot that wait() gives, then release().
template <Arch A>
class RecvLink {
 public:
  RINGCOMM_HD RecvLink(A& arch, const LinkGeometry& geometry, int peer)
      : arch_(arch),
        geometry_(geometry),
        peer_(peer),
        head_(arch.load_acquire(geometry.head->value)),
        turn_(geometry, head_) {}

  /// Waits until the next slot is filled and returns it for reading.
  RINGCOMM_HD WaitStatus wait(const std::byte*& slot) {
    const WaitStatus stop = wait_at_least(arch_, *geometry_.tail, head_ + 1, peer_);
    if (stop != WaitStatus::kNone) return stop;
    slot = turn_.slot(geometry_);
    return WaitStatus::kNone;
  }

  /// wait() that does not wait: false when no slot is filled.
  RINGCOMM_HD bool try_wait(const std::byte*& slot) {
    if (arch_.load_acquire(geometry_.tail->value) <= head_) return false;
    slot = turn_.slot(geometry_);
    return true;
  }

  /// Returns the slot to the sender.
  RINGCOMM_HD void release() {
    turn_.move_on(geometry_);
    advance(arch_, *geometry_.head, ++head_);
  }

 private:
  A& arch_;
  LinkGeometry geometry_;
  int peer_;
  std::uint64_t head_;
  SlotTurn turn_;
};

/// The steps of ring algorithms: each receives from one link, sends on another, or both at once
/// without an intermediate copy. `num_bytes` is at most the slot's size, the same on both ends, and
/// may be 0.
///
/// `Combine` is called as combine(to, also_to, received, local, num_bytes): it writes the reduction
/// of `received` and `local` to `to`, and to `also_to` unless that is null. `to` may be `local`.

/// local -> link
template <Arch A>
RINGCOMM_HD WaitStatus send(A& arch, SendLink<A>& to, const std::byte* local,
                            std::size_t num_bytes) {
  std::byte* slot = nullptr;
  if (const WaitStatus stop = to.acquire(slot); stop != WaitStatus::kNone) return stop;
  arch.copy(slot, local, num_bytes);
  to.publish();
  return WaitStatus::kNone;
}

/// link -> output
template <Arch A>
RINGCOMM_HD WaitStatus recv(A& arch, RecvLink<A>& from, std::byte* output, std::size_t num_bytes) {
  const std::byte* received = nullptr;
  if (const WaitStatus stop = from.wait(received); stop != WaitStatus::kNone) return stop;
  arch.copy(output, received, num_bytes);
  from.release();
  return WaitStatus::kNone;
}

/// link -> link: fill(slot, received), then keep(received) once that is sent.
template <Arch A, class Fill, class Keep>
RINGCOMM_HD WaitStatus pass_on(RecvLink<A>& from, SendLink<A>& to, const Fill& fill,
                               const Keep& keep) {
  const std::byte* received = nullptr;
  std::byte* slot = nullptr;
  if (const WaitStatus stop = from.wait(received); stop != WaitStatus::kNone) return stop;
  if (const WaitStatus stop = to.acquire(slot); stop != WaitStatus::kNone) return stop;
  fill(slot, received);
  to.publish();
  keep(received);
  from.release();
  return WaitStatus::kNone;
}

/// link + local -> link and, unless that is null, output
template <Arch A, class Combine>
RINGCOMM_HD WaitStatus recv_reduce_send(RecvLink<A>& from, SendLink<A>& to, std::byte* output,
                                        const std::byte* local, std::size_t num_bytes,
                                        const Combine& combine) {
  const auto fill = [&](std::byte* slot, const std::byte* received) {
    const bool is_kept = output != nullptr;
    combine(is_kept ? output : slot, is_kept ? slot : nullptr, received, local, num_bytes);
  };
  return pass_on(from, to, fill, [](const std::byte*) {});
}

/// link -> output and link. The output is copied after the send, off the critical path.
template <Arch A>
RINGCOMM_HD WaitStatus recv_copy_send(A& arch, RecvLink<A>& from, SendLink<A>& to,
                                      std::byte* output, std::size_t num_bytes) {
  return pass_on(
      from, to,
      [&](std::byte* slot, const std::byte* received) { arch.copy(slot, received, num_bytes); },
      [&](const std::byte* received) { arch.copy(output, received, num_bytes); });
}

}  // namespace ringcomm
