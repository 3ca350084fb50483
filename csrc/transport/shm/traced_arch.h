#pragma once

#include <cstddef>
#include <cstdint>

#include "collectives/trace.h"
#include "host/group.h"
#include "host/host_arch.h"
#include "host/wait_scope.h"
#include "host/workers.h"

namespace ringcomm {

/// A machine of the host whose waits are recorded, and which copies on the threads of its rank. A
/// wait reads the clock only after some pauses: one that ends before is not long.
class TracedArch final : public host::HostArch {
 public:
  TracedArch(host::WaitScope& scope, const host::Group& group, host::Workers& workers)
      : HostArch(scope, group.rank()), group_(group), workers_(workers) {}

  void copy(void* to, const void* from, std::size_t num_bytes) {
    workers_.split(num_bytes, 1, [&](std::size_t begin, std::size_t end) {
      HostArch::copy(static_cast<std::byte*>(to) + begin,
                     static_cast<const std::byte*>(from) + begin, end - begin);
    });
  }

  class Wait {
   public:
    Wait(TracedArch& arch, int peer)
        : arch_(arch), peer_(peer), span_([&] {
            return recorder::Event{.waits_for = recorder::rank16(arch.group_.whole_rank(peer)),
                                   .kind = recorder::Kind::kWait};
          }) {
      arch.num_pauses_ = 0;
      arch.begin_ticks_ = 0;
    }
    ~Wait() {
      if (arch_.begin_ticks_ != 0) [[unlikely]]
        arch_.end_wait(peer_);
    }

   private:
    TracedArch& arch_;
    int peer_;
    recorder::Span span_;
  };
  Wait record_wait(int peer) { return {*this, peer}; }
  /// Whether the next waits are for ranks to begin the collective.
  void set_arriving(bool is_arriving) { is_arriving_ = is_arriving; }

  void pause() {
    if (++num_pauses_ == kPausesWithoutClock) begin_ticks_ = ticks();
    HostArch::pause();
  }
  Yielded yield() {
    start_clock();
    return HostArch::yield();
  }
  WaitStatus stopped(int peer) {
    start_clock();
    recorder::trace_alive();
    return HostArch::stopped(peer);
  }

 private:
  static constexpr std::uint32_t kPausesWithoutClock = 64;  // 2 us

  void start_clock() {
    if (begin_ticks_ == 0) begin_ticks_ = ticks();
  }
  void end_wait(int peer) const {
    if (const std::uint64_t waited_ns = long_wait_ns(ticks() - begin_ticks_); waited_ns > 0)
      group_.record({group_.whole_rank(peer), waited_ns, is_arriving_});
  }

  const host::Group& group_;
  host::Workers& workers_;
  bool is_arriving_ = false;
  std::uint32_t num_pauses_ = 0;   // of the wait
  std::uint64_t begin_ticks_ = 0;  // of the wait; 0 until the clock is read
};
static_assert(Arch<TracedArch>);

}  // namespace ringcomm
