#include "collectives/p2p.h"

#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>

#include "collectives/trace.h"

namespace ringcomm {
namespace {

// Exists only while something is recorded, so that messages cost nothing more otherwise.
class TracedP2p final : public PointToPoint {
 public:
  TracedP2p(std::unique_ptr<PointToPoint> messages, std::uint32_t group)
      : messages_(std::move(messages)), group_(group) {}

  void post(const P2pOpPtr& op) override {
    static std::atomic<std::uint64_t> num_messages = 0;
    const bool is_send = op->kind == P2pOp::Kind::kSend;
    // The engine's own messages have tags above the users' 32 bits.
    const bool is_own = op->tag >> 32U != 0;
    const trace::Event event{.begin_ns = trace::now_ns(),
                             .seq = num_messages.fetch_add(1, std::memory_order_relaxed),
                             .num_bytes = op->num_bytes,
                             .group = group_,
                             .to = is_send ? op->peer : -1,
                             .from = is_send ? -1 : op->peer,
                             .chunk = is_own ? -1 : static_cast<std::int32_t>(op->tag),
                             .kind = trace::Kind::kMessage,
                             .name = trace::name_number(is_send ? "send" : "recv")};
    op->asked_peer = op->peer;
    trace::add(event);  // without an end: of a process that is killed there is nothing else
    // The operation keeps the function, so that the pointer is good wherever it is called.
    const auto finish = [event, op = op.get()] {
      trace::Event end = event;
      if (end.to < 0) end.from = op->peer;  // of a receive from any source it is known now
      end.end_ns = trace::now_ns();
      trace::add(end);
    };
    op->done = [finish, done = std::move(op->done)] {
      finish();
      if (done) done();
    };
    try {
      messages_->post(op);
    } catch (...) {
      finish();
      throw;
    }
  }

  bool wait(const P2pOpPtr& op, Clock::time_point deadline,
            const Interrupted& is_interrupted) override {
    const trace::Span waits([&] {
      return trace::Event{.group = group_,
                          .from = op->asked_peer,
                          .kind = trace::Kind::kWait,
                          .name = trace::name_number("wait")};
    });
    return messages_->wait(op, deadline, is_interrupted);
  }

  void close(const Interrupted& is_interrupted) override { messages_->close(is_interrupted); }

 private:
  std::unique_ptr<PointToPoint> messages_;
  std::uint32_t group_;
};

}  // namespace

std::unique_ptr<PointToPoint> traced(std::unique_ptr<PointToPoint> messages, std::uint32_t group) {
  return std::make_unique<TracedP2p>(std::move(messages), group);
}

Activity activity_of(const P2pOp& op) {
  const bool is_send = op.kind == P2pOp::Kind::kSend;
  const std::string peer = op.peer >= 0 ? "rank " + std::to_string(op.peer) : "any rank";
  return {.op = is_send ? "send" : "recv",
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
