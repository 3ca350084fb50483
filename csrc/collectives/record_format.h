#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "collectives/call.h"
#include "host/group_state.h"
#include "host/ticks.h"
#include "kernels/common/types.h"

/// What the recorder (recorder.h) writes, and a trace (trace.h). ringcomm/trace/layout.py reads it.
namespace ringcomm::recorder {

inline constexpr std::size_t kNumEvents = 1024;  // of the process's ring
inline constexpr std::size_t kNumGroups = 128;   // that are alive; none else is in the recorder
inline constexpr std::size_t kNumMembers = 64;   // the first ranks of a group
inline constexpr std::int16_t kNobody = -1, kAnyRank = -2;
/// A rank or a chunk as an event has it: kNobody where 16 bits do not hold it.
constexpr std::int16_t rank16(int rank) {
  return rank <= std::numeric_limits<std::int16_t>::max() ? static_cast<std::int16_t>(rank)
                                                          : kNobody;
}
inline constexpr std::uint64_t kNoSeq = ~std::uint64_t{0};

enum class Kind : std::uint8_t {
  // In the process's ring, and in a trace.
  kCollective = 1,  ///< from the start of its run
  kMessage,         ///< from the call
  kEnqueued,        ///< either, on a device: ends when the host sees its end, or never; in no trace
  // In a trace alone.
  kCall,   ///< a call of torch.distributed, in the thread that makes it
  kPart,   ///< the part of a collective that runs inside one host
  kStep,   ///< one step of a ring, for one slice
  kWait,   ///< for a rank
  kQueue,  ///< a wait for another thread of this rank
};

/// One event. Written by one thread at a time; a reader sees by `number`, before and after, whether
/// it is the same. Ranks are those of its group (rank16).
struct Event {
  std::uint64_t number = 0;  ///< in its ring, from 1 on; 0 while it is replaced
  std::uint64_t begin_ticks = 0;
  std::uint64_t end_ticks = 0;  ///< 0 until it ends
  std::uint64_t seq = 0;        ///< of a collective in its group; of a message its tag
  std::uint64_t num_bytes = 0;
  std::uint32_t group = 0;  ///< its number; of a Span 0 takes group and seq of the one around it
  std::int16_t peer = kNobody;       ///< the root, or the rank that it sends to or receives from
  std::int16_t waits_for = kNobody;  ///< the rank of a long wait; of a step, that it receives from
  CallStep step = {};                ///< of the long wait; step 0 of a ring is its first send
  std::int16_t chunk = -1;           ///< of a step
  Kind kind = Kind::kCollective;
  OpKind op = OpKind::kBarrier;
  DType dtype = DType::kByte;
  Reduction reduction = Reduction::kSum;
  Algorithm algorithm = Algorithm::kAuto;
  std::uint8_t title = 0;  ///< of a call, in kTitles

  /// Of a live event, too.
  bool is_waiting() const {
    return __atomic_load_n(&number, __ATOMIC_RELAXED) != 0 &&
           __atomic_load_n(&waits_for, __ATOMIC_RELAXED) != kNobody &&
           __atomic_load_n(&end_ticks, __ATOMIC_RELAXED) == 0;
  }
  bool is_message() const { return op == OpKind::kSend || op == OpKind::kRecv; }
};
static_assert(sizeof(Event) == 64);

/// Replaces an event. Word by word, so that a reader in another thread races with nothing.
void write(Event& to, const Event& event);
/// A consistent copy of an event, unless it is just being replaced.
std::optional<Event> read(const Event& from);

/// What a rank has counted of one of its peers since the group was made.
struct PeerCounts {
  std::uint64_t num_waits = 0;  ///< for it that were long (kLongWait_ns)
  std::uint64_t waited_ns = 0;  ///< in these
  /// Collectives in which it was the last for which the rank waited long (1 ms for a message)
  /// until all had begun.
  std::uint64_t num_late = 0;
  std::uint64_t sent_bytes = 0, received_bytes = 0;  ///< in messages, without the library's own
  std::uint64_t unused[3] = {};
};
static_assert(sizeof(PeerCounts) == 64);

/// A group as one of its ranks knows it.
struct GroupEntry {
  struct Member {
    std::int32_t pid;          ///< as this process sees it; -1 if it does not, as on another host
    std::int32_t global_rank;  ///< in the job
  };
  enum State : std::uint32_t {
    kUnused,
    kAlive,
    kFailed,
    kLeft,
    kMade,  ///< given out, and not yet complete; to a reader as kUnused
  };

  std::uint32_t state;
  std::int32_t rank, world_size;
  std::int32_t culprit;        ///< of the failure; -1 if it has none, or nobody is known
  std::uint64_t id;            ///< equal on all ranks of a group
  std::uint64_t failed_ticks;  ///< a call that ends later has failed
  std::uint64_t number;        ///< of the process's groups, from 1 on
  char name[48];
  char transport[96];
  char failure[256];
  Member members[kNumMembers];
};

struct Header {
  static constexpr char kMagic[9] = "RINGFLY3";
  char magic[8];
  std::uint64_t num_bytes;
  std::int32_t pid, unused;
  Anchor start;
  char version[32];  ///< of ringcomm
  std::uint64_t num_calls;
};

/// Layout of a process's recorder: a page with the header, groups, events, what each group's rank
/// has counted. Events and groups are at their number modulo the places.
struct Memory {
  explicit Memory(std::byte* data) : data_(data) {}
  Header& header() const { return *reinterpret_cast<Header*>(data_); }
  Event& event(std::uint64_t number) const {
    return reinterpret_cast<Event*>(data_ + kEventsOffset)[number % kNumEvents];
  }
  GroupEntry& group(std::uint64_t number) const {
    return reinterpret_cast<GroupEntry*>(data_ + kGroupsOffset)[number % kNumGroups];
  }
  PeerCounts* counts(std::uint64_t number) const {
    return reinterpret_cast<PeerCounts*>(data_ + kCountsOffset) + number % kNumGroups * kNumMembers;
  }

  static constexpr std::size_t kGroupsOffset = 4096;
  static constexpr std::size_t kEventsOffset = kGroupsOffset + kNumGroups * sizeof(GroupEntry);
  static constexpr std::size_t kCountsOffset = kEventsOffset + kNumEvents * sizeof(Event);
  static constexpr std::size_t kNumBytes =
      kCountsOffset + kNumGroups * kNumMembers * sizeof(PeerCounts);
  static_assert(kEventsOffset % 64 == 0);

 private:
  std::byte* data_;
};

/// A trace's file of events: this header, then a ring.
struct TraceHeader {
  static constexpr char kMagic[9] = "RINGTRC3";
  char magic[8];
  std::uint64_t num_events;
  std::uint64_t unused[2];
  /// Written in turn, each with its ticks last: the one with more ticks is complete. 0 until then.
  Anchor late[2];
};
static_assert(sizeof(TraceHeader) == sizeof(Event));

}  // namespace ringcomm::recorder
