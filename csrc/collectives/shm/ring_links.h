#pragma once

#include "collectives/shm/engine.h"
#include "collectives/trace.h"
#include "core/link_protocol.h"
#include "core/ring_schedule.h"

namespace ringcomm {

/// A rank's links in a ring, to the next rank and from the previous one, and the schedule of
/// chunks.
struct RingLinks {
  using Arch = Engine::Arch;

  RingSchedule schedule;
  SendLink<Arch> to_next;
  RecvLink<Arch> from_previous;
  std::size_t slot_bytes;

  explicit RingLinks(Engine& engine)
      : schedule(engine.rank(), engine.world_size()),
        to_next(engine.arch(), engine.group().ring_link(engine.rank()), schedule.next()),
        from_previous(engine.arch(), engine.group().ring_link(schedule.previous()),
                      schedule.previous()),
        slot_bytes(engine.group().ring_link(engine.rank()).slot_bytes),
        next_(engine.group().whole_rank(schedule.next())),
        previous_(engine.group().whole_rank(schedule.previous())) {}

  /// For the recording: a step of this rank, which passes something on unless it is the ring's
  /// last.
  trace::Span traced(trace::RingStep step, bool passes_on = true) const {
    return trace::Span([&] {
      step.from = step.step >= 0 ? previous_ : -1;
      step.to = passes_on ? next_ : -1;
      return trace::event_of(step);
    });
  }

 private:
  int next_;  // both are ranks of the whole group
  int previous_;
};

}  // namespace ringcomm
