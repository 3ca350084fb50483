#include <c10/util/Exception.h>

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

}  // namespace ringcomm
