// The monitored barrier, which is made of messages.

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "bindings/process_group.h"
#include "bindings/python_errors.h"
#include "collectives/send_recv.h"

namespace ringcomm {
namespace {

using std::chrono::milliseconds;

// The tag of the first monitored barrier; users' have 32 bits.
constexpr std::uint64_t kBarrierTag = std::uint64_t{1} << 32;

// A message with its memory, which so lives as long as the engine needs it.
struct BarrierMessage : SendRecvOp {
  std::int64_t missing_rank = -1;  ///< of rank 0's answer
};

std::shared_ptr<BarrierMessage> post_message(Communicator& group, SendRecvOp::Kind kind, int peer,
                                             std::uint64_t tag, milliseconds timeout,
                                             std::int64_t missing_rank = -1) {
  const auto message = std::make_shared<BarrierMessage>();
  message->missing_rank = missing_rank;
  message->kind = kind;
  message->peer = peer;
  message->tag = tag;
  message->data = reinterpret_cast<std::byte*>(&message->missing_rank);
  message->num_bytes = sizeof(message->missing_rank);
  message->timeout = timeout;
  group.send_recv()->post(message);
  return message;
}

bool has_come(Communicator& group, const std::shared_ptr<BarrierMessage>& message,
              SendRecv::Clock::time_point deadline) {
  if (!group.send_recv()->wait(message, deadline, is_interrupted)) return false;
  if (message->error != nullptr) std::rethrow_exception(message->error);
  return true;
}

// Rank 0 waits for a message from each rank and then tells all which is missing. A receive without
// a message stays posted; it takes the message of a late rank, which also gets its answer. Returns
// the ranks that are missing: the first, or all.
std::vector<std::int64_t> lead(Communicator& group, std::uint64_t tag, milliseconds timeout,
                               milliseconds patience, bool waits_for_all) {
  const auto deadline = SendRecv::Clock::now() + timeout;
  std::vector<std::shared_ptr<BarrierMessage>> arrivals;
  for (int peer = 1; peer < group.world_size(); ++peer)
    arrivals.push_back(post_message(group, SendRecvOp::Kind::kRecv, peer, tag, kLongestTimeout));
  std::vector<std::int64_t> missing;
  for (const auto& arrival : arrivals) {
    if (!has_come(group, arrival, deadline)) missing.push_back(arrival->peer);
    if (!missing.empty() && !waits_for_all) break;
  }
  for (int peer = 1; peer < group.world_size(); ++peer)
    post_message(group, SendRecvOp::Kind::kSend, peer, tag, patience,
                 missing.empty() ? -1 : missing.front());
  return missing;
}

}  // namespace

void ProcessGroupRingcomm::monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) {
  const recorder::Span traced(
      [&] { return trace_event_of({c10d::OpType::BARRIER, "ringcomm:monitored_barrier"}, {}); });
  const std::shared_ptr<Communicator> group = communicator();
  // The others wait longer for rank 0's answer than rank 0 for them: it reports a failure first.
  milliseconds timeout = effective(c10d::kUnsetTimeout), patience = timeout;
  if (opts.timeout != c10d::kUnsetTimeout) {
    timeout = std::min(opts.timeout, kLongestTimeout);
    patience = std::max(patience, std::min(2 * opts.timeout, kLongestTimeout));
  }
  const auto raise = [&](const std::vector<std::int64_t>& missing, milliseconds waited) {
    throw Error({.kind = ErrorKind::kTimeout,
                 .rank = static_cast<int>(missing.front()),
                 .op = "monitored_barrier"},
                c10::str("ringcomm rank ", getRank(), "/", getSize(), ": monitored_barrier: rank",
                         missing.size() > 1 ? "s " : " ", c10::Join(", ", missing),
                         " did not come within ", waited.count(), " ms"));
  };
  with_python_errors([&] {
    group->failure().rethrow_if_any();
    if (group->send_recv() == nullptr) return;
    const std::uint64_t tag = kBarrierTag + num_monitored_barriers_.fetch_add(1);
    if (getRank() == 0) {
      const auto missing = lead(*group, tag, timeout, patience, waitAllRanks);
      if (!missing.empty()) raise(missing, timeout);
      return;
    }
    const auto deadline = SendRecv::Clock::now() + patience;
    post_message(*group, SendRecvOp::Kind::kSend, 0, tag, patience);
    const auto answer = post_message(*group, SendRecvOp::Kind::kRecv, 0, tag, kLongestTimeout);
    if (!has_come(*group, answer, deadline)) raise({0}, patience);
    if (answer->missing_rank >= 0) raise({answer->missing_rank}, timeout);
  });
}

}  // namespace ringcomm
