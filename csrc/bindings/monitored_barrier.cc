#include <algorithm>
#include <array>

#include "bindings/process_group.h"
#include "bindings/python_errors.h"

namespace ringcomm {
namespace {

using Clock = PointToPoint::Clock;
using std::chrono::milliseconds;

// Users' tags have 32 bits.
constexpr std::uint64_t kArrivalTag = std::uint64_t{1} << 32;
constexpr std::uint64_t kAnswerTag = std::uint64_t{1} << 33;

// A message with its memory, which so lives as long as the engine needs it. Rank 0's answer to the
// others is the missing rank, or none; the last place of the text stays a zero.
struct Note : P2pOp {
  struct Answer {
    std::int64_t missing_rank = -1;
    std::array<char, 504> text = {};
  } answer;
};

class MonitoredBarrier {
 public:
  // `patience` is for rank 0's answer.
  MonitoredBarrier(Communicator& group, std::uint64_t barrier_idx, milliseconds patience)
      : group_(group), barrier_idx_(barrier_idx), patience_(patience) {}

  void lead(milliseconds timeout, bool waits_for_all) {
    const Clock::time_point deadline = Clock::now() + timeout;
    std::vector<std::shared_ptr<Note>> arrivals;
    for (int peer = 1; peer < group_.world_size(); ++peer)
      arrivals.push_back(post(P2pOp::Kind::kRecv, peer, kArrivalTag));
    Note::Answer answer;
    std::string missing;
    for (const auto& arrival : arrivals) {
      if (has_come(arrival, deadline)) continue;
      if (missing.empty()) answer.missing_rank = arrival->peer;
      missing += (missing.empty() ? "" : ", ") + std::to_string(arrival->peer);
      if (!waits_for_all) break;
    }
    const std::string text = (waits_for_all ? "Ranks " : "Rank ") + missing +
                             " failed to pass monitoredBarrier in " +
                             std::to_string(timeout.count()) + " ms";
    text.copy(answer.text.data(), answer.text.size() - 1);
    for (int peer = 1; peer < group_.world_size(); ++peer)
      post(P2pOp::Kind::kSend, peer, kAnswerTag, answer);
    if (!missing.empty()) raise(answer.missing_rank, answer.text.data());
  }

  void follow() {
    const std::string reached = "Rank " + std::to_string(group_.rank()) +
                                " successfully reached monitoredBarrier, but received errors while "
                                "waiting for send/recv from rank 0: ";
    post(P2pOp::Kind::kSend, 0, kArrivalTag);
    const auto note = post(P2pOp::Kind::kRecv, 0, kAnswerTag);
    if (!has_come(note, Clock::now() + patience_))
      raise(0, reached + "it did not answer in " + std::to_string(patience_.count()) + " ms");
    const Note::Answer& answer = note->answer;
    if (answer.missing_rank >= 0) raise(answer.missing_rank, reached + answer.text.data());
  }

 private:
  std::shared_ptr<Note> post(P2pOp::Kind kind, int peer, std::uint64_t tag,
                             const Note::Answer& answer = {}) {
    const auto note = std::make_shared<Note>();
    note->answer = answer;
    note->kind = kind;
    note->peer = peer;
    note->tag = tag + barrier_idx_;
    note->data = reinterpret_cast<std::byte*>(&note->answer);
    note->num_bytes = sizeof(note->answer);
    // Receives end at the barrier's own deadline and stay posted.
    note->timeout = kind == P2pOp::Kind::kSend ? patience_ : kLongestTimeout;
    group_.p2p()->post(note);
    return note;
  }

  bool has_come(const std::shared_ptr<Note>& note, Clock::time_point deadline) {
    if (!group_.p2p()->wait(note, deadline, is_interrupted)) return false;
    if (note->error != nullptr) std::rethrow_exception(note->error);
    return true;
  }

  [[noreturn]] void raise(std::int64_t missing_rank, const std::string& text) const {
    throw Error({.kind = ErrorKind::kTimeout,
                 .rank = static_cast<int>(missing_rank),
                 .op = "monitored_barrier"},
                "ringcomm rank " + std::to_string(group_.rank()) + "/" +
                    std::to_string(group_.world_size()) + ": " + text);
  }

  Communicator& group_;
  std::uint64_t barrier_idx_;
  milliseconds patience_;
};

}  // namespace

void ProcessGroupRingcomm::monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) {
  const trace::Span traced(
      [&] { return trace_event_of({c10d::OpType::BARRIER, "ringcomm:monitored_barrier"}, {}); });
  const std::shared_ptr<Communicator> group = communicator();
  milliseconds timeout = effective(c10d::kUnsetTimeout), patience = timeout;
  if (opts.timeout != c10d::kUnsetTimeout) {
    timeout = std::min(opts.timeout, kLongestTimeout);
    patience = std::max(patience, std::min(2 * opts.timeout, kLongestTimeout));
  }
  with_python_errors([&] {
    group->failure().rethrow_if_any();
    if (timeout <= milliseconds(0))
      throw Error({.kind = ErrorKind::kTimeout, .rank = getRank(), .op = "monitored_barrier"},
                  "ringcomm: Rank " + std::to_string(getRank()) +
                      " timed out in monitoredBarrier after 0 ms");
    if (group->p2p() == nullptr) return;
    MonitoredBarrier barrier(*group, num_monitored_barriers_.fetch_add(1), patience);
    if (getRank() == 0)
      barrier.lead(timeout, waitAllRanks);
    else
      barrier.follow();
  });
}

}  // namespace ringcomm
