// The monitored barrier, which is made of messages.

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
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

// What rank 0 of a monitored barrier answers to the others: the missing rank, or none. The last
// place of the text stays a zero.
struct Answer {
  std::int64_t missing_rank = -1;
  std::array<char, 504> text = {};
};

// A message with its memory, which so lives as long as the engine needs it.
struct BarrierMessage : SendRecvOp {
  Answer answer;
};

std::shared_ptr<BarrierMessage> post_message(Communicator& group, SendRecvOp::Kind kind, int peer,
                                             std::uint64_t tag, milliseconds timeout,
                                             const Answer& answer = {}) {
  const auto message = std::make_shared<BarrierMessage>();
  message->answer = answer;
  message->kind = kind;
  message->peer = peer;
  message->tag = tag;
  message->data = reinterpret_cast<std::byte*>(&message->answer);
  message->num_bytes = sizeof(message->answer);
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

// Rank 0 waits for a message from each rank and then answers all. A receive without a message stays
// posted; it takes the message of a late rank, which also gets its answer. Returns that answer.
Answer lead(Communicator& group, std::uint64_t tag, milliseconds timeout, milliseconds patience,
            bool waits_for_all) {
  const auto deadline = SendRecv::Clock::now() + timeout;
  std::vector<std::shared_ptr<BarrierMessage>> arrivals;
  for (int peer = 1; peer < group.world_size(); ++peer)
    arrivals.push_back(post_message(group, SendRecvOp::Kind::kRecv, peer, tag, kLongestTimeout));
  Answer answer;
  std::string missing;
  for (const auto& arrival : arrivals) {
    if (has_come(group, arrival, deadline)) continue;
    if (missing.empty()) answer.missing_rank = arrival->peer;
    missing += (missing.empty() ? "" : ", ") + std::to_string(arrival->peer);
    if (!waits_for_all) break;
  }
  const std::string text = c10::str(waits_for_all ? "Ranks " : "Rank ", missing,
                                    " failed to pass monitoredBarrier in ", timeout.count(), " ms");
  text.copy(answer.text.data(), answer.text.size() - 1);
  for (int peer = 1; peer < group.world_size(); ++peer)
    post_message(group, SendRecvOp::Kind::kSend, peer, tag, patience, answer);
  return answer;
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
  const auto raise = [&](std::int64_t missing_rank, const std::string& text) {
    throw Error({.kind = ErrorKind::kTimeout,
                 .rank = static_cast<int>(missing_rank),
                 .op = "monitored_barrier"},
                "ringcomm" + text);
  };
  const std::string who = c10::str(" rank ", getRank(), "/", getSize(), ": ");
  const std::string reached =
      c10::str(who, "Rank ", getRank(),
               " successfully reached monitoredBarrier, but received errors while "
               "waiting for send/recv from rank 0: ");
  with_python_errors([&] {
    group->failure().rethrow_if_any();
    if (timeout <= milliseconds(0))
      raise(getRank(), c10::str(": Rank ", getRank(), " timed out in monitoredBarrier after 0 ms"));
    if (group->send_recv() == nullptr) return;
    const std::uint64_t tag = kBarrierTag + num_monitored_barriers_.fetch_add(1);
    if (getRank() == 0) {
      const Answer answer = lead(*group, tag, timeout, patience, waitAllRanks);
      if (answer.missing_rank >= 0) raise(answer.missing_rank, who + answer.text.data());
      return;
    }
    const auto deadline = SendRecv::Clock::now() + patience;
    post_message(*group, SendRecvOp::Kind::kSend, 0, tag, patience);
    const auto message = post_message(*group, SendRecvOp::Kind::kRecv, 0, tag, kLongestTimeout);
    if (!has_come(*group, message, deadline))
      raise(0, c10::str(reached, "it did not answer in ", patience.count(), " ms"));
    if (message->answer.missing_rank >= 0)
      raise(message->answer.missing_rank, reached + message->answer.text.data());
  });
}

}  // namespace ringcomm
