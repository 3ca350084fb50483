#include "bindings/monitored_barrier.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python_errors.h"
#include "collectives/p2p.h"
#include "core/errors.h"
#include "transport/wait_limits.h"

namespace ringcomm {
namespace {

// Users' tags have 32 bits.
constexpr std::uint64_t kArrivalTag = std::uint64_t{1} << 32;
constexpr std::uint64_t kAnswerTag = std::uint64_t{1} << 33;

using Clock = PointToPoint::Clock;

// Rank 0's answer to the others: the missing rank, or none.
struct Answer {
  std::int64_t missing_rank = -1;
  std::array<char, 504> text = {};
};

// A message and its memory, which lives as long as the engine needs it.
struct Note {
  Answer answer;
  P2pOpPtr op = std::make_shared<P2pOp>();
};
using NotePtr = std::shared_ptr<Note>;

class MonitoredBarrier {
 public:
  MonitoredBarrier(Communicator& communicator, std::uint64_t barrier_idx,
                   std::chrono::milliseconds patience)
      : communicator_(communicator), barrier_idx_(barrier_idx), patience_(patience) {}

  void lead(std::chrono::milliseconds timeout, bool waits_for_all) {
    const Clock::time_point deadline = Clock::now() + timeout;
    std::vector<NotePtr> arrivals;
    for (int peer = 1; peer < communicator_.world_size(); ++peer)
      arrivals.push_back(post(P2pOp::Kind::kRecv, peer, kArrivalTag, {}));
    std::vector<int> missing;
    for (const NotePtr& arrival : arrivals) {
      if (has_come(*arrival, deadline)) continue;
      missing.push_back(arrival->op->peer);
      if (!waits_for_all) break;
    }
    Answer answer;
    if (!missing.empty()) answer = describe(missing, timeout, waits_for_all);
    for (int peer = 1; peer < communicator_.world_size(); ++peer)
      post(P2pOp::Kind::kSend, peer, kAnswerTag, answer);
    if (!missing.empty()) raise(answer, answer.text.data());
  }

  void follow() {
    const std::string reached = "Rank " + std::to_string(communicator_.rank()) +
                                " successfully reached monitoredBarrier, but received errors while "
                                "waiting for send/recv from rank 0: ";
    post(P2pOp::Kind::kSend, 0, kArrivalTag, {});
    const NotePtr answer = post(P2pOp::Kind::kRecv, 0, kAnswerTag, {});
    if (!has_come(*answer, Clock::now() + patience_))
      raise({.missing_rank = 0},
            reached + "it did not answer in " + std::to_string(patience_.count()) + " ms");
    if (answer->answer.missing_rank >= 0)
      raise(answer->answer, reached + answer->answer.text.data());
  }

 private:
  NotePtr post(P2pOp::Kind kind, int peer, std::uint64_t tag, const Answer& answer) {
    const auto note = std::make_shared<Note>();
    note->answer = answer;
    const bool is_send = kind == P2pOp::Kind::kSend;
    *note->op = {.kind = kind,
                 .peer = peer,
                 .tag = tag + barrier_idx_,
                 .data = reinterpret_cast<std::byte*>(&note->answer),
                 .num_bytes = sizeof(note->answer),
                 // Receives end at the barrier's own deadline and stay posted.
                 .timeout = is_send ? patience_ : kLongestTimeout,
                 .done = [note] {}};
    communicator_.p2p()->post(note->op);
    return note;
  }

  bool has_come(const Note& note, Clock::time_point deadline) {
    if (!communicator_.p2p()->wait(note.op, deadline, is_interrupted)) return false;
    if (note.op->error != nullptr) std::rethrow_exception(note.op->error);
    return true;
  }

  static Answer describe(const std::vector<int>& missing, std::chrono::milliseconds timeout,
                         bool are_all) {
    std::string text = are_all ? "Ranks " : "Rank ";
    for (const int rank : missing)
      text += (rank == missing.front() ? "" : ", ") + std::to_string(rank);
    text += " failed to pass monitoredBarrier in " + std::to_string(timeout.count()) + " ms";
    Answer answer{.missing_rank = missing.front()};
    // The last place stays a zero.
    text.copy(answer.text.data(), answer.text.size() - 1);
    return answer;
  }

  [[noreturn]] void raise(const Answer& answer, const std::string& text) const {
    throw Error({.kind = ErrorKind::kTimeout,
                 .rank = static_cast<int>(answer.missing_rank),
                 .op = "monitored_barrier"},
                "ringcomm rank " + std::to_string(communicator_.rank()) + "/" +
                    std::to_string(communicator_.world_size()) + ": " + text);
  }

  Communicator& communicator_;
  std::uint64_t barrier_idx_;
  std::chrono::milliseconds patience_;
};

}  // namespace

void monitored_barrier(const std::shared_ptr<Communicator>& communicator,
                       std::atomic<std::uint64_t>& num_barriers, std::chrono::milliseconds timeout,
                       std::chrono::milliseconds patience, bool waits_for_all) {
  communicator->failure().rethrow_if_any();
  if (timeout <= std::chrono::milliseconds(0))
    throw Error(
        {.kind = ErrorKind::kTimeout, .rank = communicator->rank(), .op = "monitored_barrier"},
        "ringcomm: Rank " + std::to_string(communicator->rank()) +
            " timed out in monitoredBarrier after 0 ms");
  if (communicator->p2p() == nullptr) return;
  MonitoredBarrier barrier(*communicator, num_barriers.fetch_add(1), patience);
  if (communicator->rank() == 0)
    barrier.lead(timeout, waits_for_all);
  else
    barrier.follow();
}

}  // namespace ringcomm
