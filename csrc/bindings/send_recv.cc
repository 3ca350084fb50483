// Sends and receives, and the monitored barrier.

#include "collectives/send_recv.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

#include "bindings/process_group.h"
#include "bindings/python_errors.h"
#include "collectives/call.h"

namespace ringcomm {

WorkPtr ProcessGroupRingcomm::send(Tensors& tensors, int dstRank, int tag) {
  return start_message(c10d::OpType::SEND, "ringcomm:send", only_tensor(tensors, "send"),
                       checked_rank(dstRank, "the destination of send"), tag);
}

WorkPtr ProcessGroupRingcomm::recv(Tensors& tensors, int srcRank, int tag) {
  return start_message(c10d::OpType::RECV, "ringcomm:recv", only_tensor(tensors, "recv"),
                       checked_rank(srcRank, "the source of recv"), tag);
}

WorkPtr ProcessGroupRingcomm::recvAnysource(Tensors& tensors, int tag) {
  return start_message(c10d::OpType::RECVANYSOURCE, "ringcomm:recvAnySource",
                       only_tensor(tensors, "recv"), -1, tag);
}

WorkPtr ProcessGroupRingcomm::start_message(c10d::OpType op_type, const char* title,
                                            const at::Tensor& tensor, int peer, int tag) {
  const bool is_send = op_type == c10d::OpType::SEND;
  TORCH_CHECK_VALUE(peer != getRank(), "ringcomm: rank ", peer, " cannot ",
                    is_send ? "send to" : "receive from", " itself");
  TORCH_CHECK_VALUE(getSize() > 1, "ringcomm: a group of one rank has no peer to receive from");
  TORCH_CHECK_VALUE(tag >= 0, "ringcomm: the tag of a message must be 0 or more, got ", tag);
  CallInfo info{op_type, title};
  info.is_async = true;
  info.peer = peer;
  info.tag = tag;
  TensorCall item{
      .call = {{.num_elems = tensor.nbytes(), .op = is_send ? OpKind::kSend : OpKind::kRecv}}};
  if (is_send)
    item.inputs = {readable(tensor, item)};
  else
    // With what it has: a message may be shorter.
    item.outputs = {writable(tensor, item, /*is_input_too=*/true).data_ptr()};
  item.profiled = {tensor};
  return start(info, std::move(item), {tensor});
}

// ---- The monitored barrier, which is made of messages

namespace {

using std::chrono::milliseconds;

// A message with its memory, which so lives as long as the engine needs it.
struct BarrierMessage : SendRecvOp {
  std::int64_t missing_rank = -1;  ///< of rank 0's answer
};

std::shared_ptr<BarrierMessage> post_message(Communicator& group, OpKind kind, int peer,
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
std::vector<int> lead(Communicator& group, std::uint64_t tag, milliseconds timeout,
                      milliseconds patience, bool waits_for_all) {
  const auto deadline = SendRecv::Clock::now() + timeout;
  std::vector<std::shared_ptr<BarrierMessage>> arrivals;
  for (int peer = 1; peer < group.world_size(); ++peer)
    arrivals.push_back(post_message(group, OpKind::kRecv, peer, tag, kLongestTimeout));
  std::vector<int> missing;
  for (const auto& arrival : arrivals) {
    if (!has_come(group, arrival, deadline)) missing.push_back(arrival->peer);
    if (!missing.empty() && !waits_for_all) break;
  }
  for (int peer = 1; peer < group.world_size(); ++peer)
    post_message(group, OpKind::kSend, peer, tag, patience, missing.empty() ? -1 : missing.front());
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
  const auto raise = [&](const std::vector<int>& missing, milliseconds waited) {
    const int global_rank = group->group_state()->global_rank_of(getRank());
    throw Error({.kind = ErrorKind::kTimeout, .rank = missing.front(), .op = "monitored_barrier"},
                c10::str(prefix_of(getRank(), getSize(), global_rank), "monitored_barrier: ",
                         name_of_ranks(missing, options_->global_ranks_in_group),
                         " did not come within ", waited.count(), " ms"));
  };
  with_python_errors([&] {
    group->failure().rethrow_if_any();
    if (group->send_recv() == nullptr) return;
    const std::uint64_t tag = SendRecvOp::kFirstInternalTag + num_monitored_barriers_.fetch_add(1);
    if (getRank() == 0) {
      const auto missing = lead(*group, tag, timeout, patience, waitAllRanks);
      if (!missing.empty()) raise(missing, timeout);
      return;
    }
    const auto deadline = SendRecv::Clock::now() + patience;
    post_message(*group, OpKind::kSend, 0, tag, patience);
    const auto answer = post_message(*group, OpKind::kRecv, 0, tag, kLongestTimeout);
    if (!has_come(*group, answer, deadline)) raise({0}, patience);
    if (answer->missing_rank >= 0) raise({static_cast<int>(answer->missing_rank)}, timeout);
  });
}

}  // namespace ringcomm
