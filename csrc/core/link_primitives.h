#pragma once

#include <cstddef>

#include "core/annotations.h"
#include "core/link_protocol.h"

namespace ringcomm {

/// The steps of ring algorithms. Each receives from one link, sends on another, or both at once
/// without an intermediate copy. `num_bytes` is at most the slot's size, the same on both ends, and
/// may be 0.
///
/// `Combine` is called as combine(to, also_to, received, local, num_bytes): it writes the reduction
/// of `received` and `local` to `to`, and to `also_to` unless that is null. `to` may be `local`.

/// local -> link
template <Arch A>
RINGCOMM_HD Stop send(A& arch, SendLink<A>& to, const std::byte* local, std::size_t num_bytes) {
  std::byte* slot = nullptr;
  if (const Stop stop = to.acquire(slot); stop != Stop::kNone) return stop;
  arch.copy(slot, local, num_bytes);
  to.publish();
  return Stop::kNone;
}

/// link -> output
template <Arch A>
RINGCOMM_HD Stop recv(A& arch, RecvLink<A>& from, std::byte* output, std::size_t num_bytes) {
  const std::byte* received = nullptr;
  if (const Stop stop = from.wait(received); stop != Stop::kNone) return stop;
  arch.copy(output, received, num_bytes);
  from.release();
  return Stop::kNone;
}

/// link + local -> link
template <Arch A, class Combine>
RINGCOMM_HD Stop recv_reduce_send(RecvLink<A>& from, SendLink<A>& to, const std::byte* local,
                                  std::size_t num_bytes, const Combine& combine) {
  const std::byte* received = nullptr;
  std::byte* slot = nullptr;
  if (const Stop stop = from.wait(received); stop != Stop::kNone) return stop;
  if (const Stop stop = to.acquire(slot); stop != Stop::kNone) return stop;
  combine(slot, nullptr, received, local, num_bytes);
  to.publish();
  from.release();
  return Stop::kNone;
}

/// link + local -> output
template <Arch A, class Combine>
RINGCOMM_HD Stop recv_reduce_copy(RecvLink<A>& from, std::byte* output, const std::byte* local,
                                  std::size_t num_bytes, const Combine& combine) {
  const std::byte* received = nullptr;
  if (const Stop stop = from.wait(received); stop != Stop::kNone) return stop;
  combine(output, nullptr, received, local, num_bytes);
  from.release();
  return Stop::kNone;
}

/// link + local -> output and link
template <Arch A, class Combine>
RINGCOMM_HD Stop recv_reduce_copy_send(RecvLink<A>& from, SendLink<A>& to, std::byte* output,
                                       const std::byte* local, std::size_t num_bytes,
                                       const Combine& combine) {
  const std::byte* received = nullptr;
  std::byte* slot = nullptr;
  if (const Stop stop = from.wait(received); stop != Stop::kNone) return stop;
  if (const Stop stop = to.acquire(slot); stop != Stop::kNone) return stop;
  combine(output, slot, received, local, num_bytes);
  to.publish();
  from.release();
  return Stop::kNone;
}

/// link -> output and link
template <Arch A>
RINGCOMM_HD Stop recv_copy_send(A& arch, RecvLink<A>& from, SendLink<A>& to, std::byte* output,
                                std::size_t num_bytes) {
  const std::byte* received = nullptr;
  std::byte* slot = nullptr;
  if (const Stop stop = from.wait(received); stop != Stop::kNone) return stop;
  if (const Stop stop = to.acquire(slot); stop != Stop::kNone) return stop;
  arch.copy(slot, received, num_bytes);
  to.publish();
  // The output is copied after the send to the neighbour, so the copy is off the critical path.
  arch.copy(output, received, num_bytes);
  from.release();
  return Stop::kNone;
}

}  // namespace ringcomm
