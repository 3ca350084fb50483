#pragma once

#include "collectives/shm/engine.h"
#include "core/link_protocol.h"
#include "core/ring_schedule.h"

namespace ringcomm {

/// A rank's place in a ring: to whom it sends, from whom it receives, and when what.
struct RingLinks {
  using Arch = Engine::Arch;

  RingSchedule schedule;
  SendLink<Arch> to_next;
  RecvLink<Arch> from_previous;

  /// On links cut as `header` says.
  RingLinks(Engine& engine, const CallHeader& header)
      : schedule(engine.rank(), engine.world_size()),
        to_next(engine.arch(), cut(engine.group().ring_link(engine.rank()), header),
                schedule.next()),
        from_previous(engine.arch(), cut(engine.group().ring_link(schedule.previous()), header),
                      schedule.previous()) {}

 private:
  static LinkGeometry cut(LinkGeometry geometry, const CallHeader& header) {
    geometry.num_slots = header.ring_num_slots;
    geometry.slot_bytes = header.ring_slot_bytes;
    return geometry;
  }
};

}  // namespace ringcomm
