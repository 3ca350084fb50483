#include "collectives/traced_p2p.h"

#include <atomic>
#include <utility>

#include "collectives/trace.h"

namespace ringcomm {
namespace {

std::atomic<std::uint64_t> num_messages = 0;

trace::Event event_of(const P2pOp& op, std::uint32_t group) {
  const bool is_send = op.kind == P2pOp::Kind::kSend;
  // The engine's own messages have tags above the users' 32 bits.
  const bool is_own = op.tag >> 32U != 0;
  return {.begin_ns = trace::now_ns(),
          .seq = num_messages.fetch_add(1, std::memory_order_relaxed),
          .num_bytes = op.num_bytes,
          .group = group,
          .to = is_send ? op.peer : -1,
          .from = is_send ? -1 : op.peer,
          .chunk = is_own ? -1 : static_cast<std::int32_t>(op.tag),
          .kind = trace::Kind::kMessage,
          .name = trace::name_number(is_send ? "send" : "recv")};
}

}  // namespace

void TracedP2p::post(const P2pOpPtr& op) {
  const trace::Event event = event_of(*op, group_);
  op->asked_peer = op->peer;
  trace::add(event);  // without an end: of a process that is killed there is nothing else
  auto finish = [event = event](const P2pOp& op) mutable {
    if (event.to < 0) event.from = op.peer;  // of a receive from any source it is known now
    event.end_ns = trace::now_ns();
    trace::add(event);
  };
  // The operation keeps the function, so that the pointer is good wherever it is called.
  op->done = [finish, op = op.get(), done = std::move(op->done)]() mutable {
    finish(*op);
    if (done) done();
  };
  try {
    messages_->post(op);
  } catch (...) {
    finish(*op);
    throw;
  }
}

bool TracedP2p::wait(const P2pOpPtr& op, Clock::time_point deadline,
                     const Interrupted& is_interrupted) {
  const trace::Span traced([&] {
    return trace::Event{.group = group_,
                        .from = op->asked_peer,
                        .kind = trace::Kind::kWait,
                        .name = trace::name_number("wait")};
  });
  return messages_->wait(op, deadline, is_interrupted);
}

}  // namespace ringcomm
