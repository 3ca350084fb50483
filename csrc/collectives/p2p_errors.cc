#include "collectives/p2p_errors.h"

#include <stdexcept>

#include "core/errors.h"

namespace ringcomm {

Activity activity_of(const P2pOp& op) {
  const bool is_send = op.kind == P2pOp::Kind::kSend;
  const std::string peer = op.peer >= 0 ? "rank " + std::to_string(op.peer) : "any rank";
  return {.op = is_send ? "send" : "recv",
          .seq = -1,
          .description = (is_send ? "send to " : "recv from ") + peer + " (tag " +
                         std::to_string(op.tag) + ", " + std::to_string(op.num_bytes) + " bytes)",
          .timeout = op.timeout};
}

void check_peer(const P2pOp& op, int rank, int world_size) {
  const int least = op.kind == P2pOp::Kind::kRecv ? -1 : 0;  // -1: from any source
  if (op.peer < least || op.peer >= world_size || op.peer == rank)
    throw std::invalid_argument(
        "the peer of a send or receive must be another rank of the group's " +
        std::to_string(world_size) + ", got " + std::to_string(op.peer));
}

void raise_misfit(Failure& failure, const P2pOp& receive, std::uint64_t sent_bytes, int rank) {
  failure.raise_mismatch(receive.peer,
                         "rank " + std::to_string(receive.peer) + " sent " +
                             std::to_string(sent_bytes) + " bytes with this tag, where rank " +
                             std::to_string(rank) + " receives " +
                             std::to_string(receive.num_bytes),
                         activity_of(receive));
}

std::exception_ptr orphaned(const P2pOp& op, int rank) {
  const Activity activity = activity_of(op);
  return std::make_exception_ptr(
      Error({.kind = ErrorKind::kAborted, .rank = rank, .op = activity.op},
            "ringcomm: " + activity.description + ": the group was destroyed before " +
                (op.kind == P2pOp::Kind::kSend ? "it was sent" : "a message arrived")));
}

}  // namespace ringcomm
