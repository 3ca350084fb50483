// Sends and receives, and blocks of calls that start together.

#include <ATen/DeviceAccelerator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "bindings/process_group.h"
#include "collectives/op_kind.h"

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
      .call = {.op = is_send ? OpKind::kSend : OpKind::kRecv, .num_elems = tensor.nbytes()}};
  if (is_send)
    item.inputs = {readable(tensor, item)};
  else
    // With what it has: a message may be shorter.
    item.outputs = {writable(tensor, item, /*is_input_too=*/true).data_ptr()};
  item.profiled = {tensor};
  return start(info, std::move(item), {tensor});
}

// ---- coalesced

constexpr std::size_t kMaxFinishedWorks = 1024;  // of one coalesced block

bool ProcessGroupRingcomm::supportsCoalescing() const { return at::getAccelerator().has_value(); }

void ProcessGroupRingcomm::startCoalescing() {
  std::vector<WorkPtr> works;  // of a block that an exception left, as the next ones
  std::vector<DeviceMessage> messages;
  const std::lock_guard lock(mutex_);
  is_coalescing_ = true;
  works.swap(coalesced_works_);
  messages.swap(coalesced_messages_);
}

WorkPtr ProcessGroupRingcomm::endCoalescing() {
  std::vector<WorkPtr> works;
  std::vector<DeviceMessage> messages;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK_VALUE(is_coalescing_, "ringcomm: endCoalescing() without startCoalescing()");
    is_coalescing_ = false;
    works.swap(coalesced_works_);
    messages.swap(coalesced_messages_);
  }
  if (!messages.empty()) {
    CallInfo info(c10d::OpType::COALESCED, "ringcomm:coalesced");
    info.is_async = true;
    works.push_back(devices()->exchange(info, std::move(messages), {}));
  }
  return coalesced_work(getRank(), std::move(works));
}

WorkPtr ProcessGroupRingcomm::coalesced(WorkPtr work) {
  if (!is_coalescing_ || work == nullptr) return work;
  std::vector<WorkPtr> finished;
  {
    const std::lock_guard lock(mutex_);
    coalesced_works_.push_back(work);
    // A block that an exception has left open must not keep all later works.
    if (coalesced_works_.size() > kMaxFinishedWorks) finished = coalesced_works_;
  }
  // Without the lock: a work that has ended may free a tensor, which takes the GIL.
  std::erase_if(finished, [&](const auto& other) {
    return !other->isCompleted() || !other->isSuccess() || other == work;
  });
  if (finished.empty()) return work;
  const std::lock_guard lock(mutex_);
  std::erase_if(coalesced_works_, [&](const auto& other) {
    return std::ranges::find(finished, other) != finished.end();
  });
  return work;
}

}  // namespace ringcomm
