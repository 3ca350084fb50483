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

  /// Uses links with the slots of `header`.
  RingLinks(Engine& engine, const CallHeader& header)
      : schedule(engine.rank(), engine.world_size()),
        to_next(engine.arch(), cut(engine.group().ring_link(engine.rank()), header),
                schedule.next()),
        from_previous(engine.arch(), cut(engine.group().ring_link(schedule.previous()), header),
                      schedule.previous()),
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
  static LinkGeometry cut(LinkGeometry geometry, const CallHeader& header) {
    geometry.num_slots = header.ring_num_slots;
    geometry.slot_bytes = header.ring_slot_bytes;
    return geometry;
  }

  int next_;  // both are ranks of the whole group
  int previous_;
};

}  // namespace ringcomm
