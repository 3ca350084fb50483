// Sends and receives.

#include <c10/util/Exception.h>

#include <cstdint>
#include <utility>

#include "bindings/process_group.h"
#include "bindings/tensors.h"

namespace ringcomm {

ProcessGroupRingcomm::Work ProcessGroupRingcomm::start_p2p(P2pOp::Kind kind,
                                                           const at::Tensor& tensor, int peer,
                                                           int tag) {
  const bool is_send = kind == P2pOp::Kind::kSend;
  TORCH_CHECK_VALUE(peer != getRank(), "ringcomm: rank ", peer, " cannot ",
                    is_send ? "send to" : "receive from", " itself");
  TORCH_CHECK_VALUE(getSize() > 1, "ringcomm: a group of one rank has no peer to receive from");
  if (!is_send) check_no_overlap(tensor);
  const char* title = is_send    ? "ringcomm:send"
                      : peer < 0 ? "ringcomm:recvAnySource"
                                 : "ringcomm:recv";
  const trace::Span traced([&] {
    trace::Event event = trace_event_of(title, {});
    event.seq = trace::kNoSeq;
    (is_send ? event.to : event.from) = peer;
    event.num_bytes = tensor.nbytes();
    return event;
  });
  const auto run = [&] { return coalesced(start_message(kind, title, tensor, peer, tag)); };
  if (!is_profiled()) return run();
  CommsEvent event = event_of(title);
  event.is_p2p = true;
  event.is_async = true;
  const auto num_bytes = static_cast<std::int64_t>(tensor.nbytes());
  (is_send ? event.input_bytes : event.output_bytes) = num_bytes;
  (is_send ? event.inputs : event.outputs) = {tensor};
  return event.around(run);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::start_message(P2pOp::Kind kind, const char* title,
                                                               const at::Tensor& tensor, int peer,
                                                               int tag) {
  const auto op_type = kind == P2pOp::Kind::kSend ? c10d::OpType::SEND
                       : peer < 0                 ? c10d::OpType::RECVANYSOURCE
                                                  : c10d::OpType::RECV;
  if (!tensor.device().is_cpu()) return start_device_message(kind, title, tensor, peer, tag);
  const std::shared_ptr<Communicator> engine = communicator();
  auto work = c10::make_intrusive<P2pWork>(engine, op_type, title, tensor);
  P2pWork::post(work, *engine,
                {.kind = kind,
                 .peer = peer,
                 .tag = static_cast<std::uint32_t>(tag),
                 .timeout = effective(c10d::kUnsetTimeout)});
  return work;
}

// A single call is ordered with the group's calls on the device. A call in a coalesced block starts
// with the others.
ProcessGroupRingcomm::Work ProcessGroupRingcomm::start_device_message(P2pOp::Kind kind,
                                                                      const char* title,
                                                                      const at::Tensor& tensor,
                                                                      int peer, int tag) {
  if (peer < 0)
    C10_THROW_ERROR(NotImplementedError,
                    c10::str("ringcomm: a tensor on ", tensor.device(),
                             " cannot be received from any source; name the rank"));
  const bool is_send = kind == P2pOp::Kind::kSend;
  TensorCall item;
  void* data = is_send ? const_cast<void*>(readable(tensor, item))
                       : Writable(tensor, item, false).buffer().data_ptr();
  std::vector<DeviceMessageCall> calls;
  calls.push_back({.device = tensor.device(),
                   .message = {.is_send = is_send,
                               .data = data,
                               .num_bytes = tensor.nbytes(),
                               .peer = peer,
                               .tag = tag},
                   .item = std::move(item)});
  {
    const std::lock_guard lock(mutex_);
    if (is_coalescing_) {
      TORCH_CHECK_VALUE(
          coalesced_messages_.empty() || coalesced_messages_[0].device == tensor.device(),
          "ringcomm: a batch of sends and receives got tensors on ", tensor.device(), " and on ",
          coalesced_messages_[0].device, "; all tensors of a batch must be on one device");
      coalesced_messages_.push_back(std::move(calls[0]));
      return nullptr;
    }
  }
  return devices()->exchange(tensor.device(), std::move(calls),
                             {.op_type = is_send ? c10d::OpType::SEND : c10d::OpType::RECV,
                              .title = title,
                              .results = {tensor}});
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::send(std::vector<at::Tensor>& tensors, int dstRank,
                                                      int tag) {
  return start_p2p(P2pOp::Kind::kSend, only_tensor(tensors, "send"),
                   checked_rank(dstRank, getSize(), "the destination of send"), tag);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::recv(std::vector<at::Tensor>& tensors, int srcRank,
                                                      int tag) {
  return start_p2p(P2pOp::Kind::kRecv, only_tensor(tensors, "recv"),
                   checked_rank(srcRank, getSize(), "the source of recv"), tag);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::recvAnysource(std::vector<at::Tensor>& tensors,
                                                               int tag) {
  return start_p2p(P2pOp::Kind::kRecv, only_tensor(tensors, "recv"), -1, tag);
}

}  // namespace ringcomm
