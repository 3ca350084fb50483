#include "collectives/send_recv.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "collectives/op_kind.h"

namespace ringcomm {

void SendRecv::post(const SendRecvOpPtr& op) {
  const int least = op->is_send() ? 0 : -1;  // -1: from any source
  if (op->peer < least || op->peer >= world_size_ || op->peer == rank_)
    throw std::invalid_argument(
        "the peer of a send or receive must be another rank of the group's " +
        std::to_string(world_size_) + ", got " + std::to_string(op->peer));
  failure_.check_not_inherited();  // before a lock that may have been held at the fork
  op->deadline = deadline_after(op->timeout);
  if (op->peer >= 0) op->awaited = op->peer;
  op->recorded = record(*op);
  if (trace_group_ != trace::kNoGroup) trace_begin(*op);
  try {
    start(op);
  } catch (const std::system_error& no_thread) {
    record_end(*op);
    failure_.abort(activity_of(*op).description + ": " + no_thread.what());
    throw;
  } catch (...) {
    record_end(*op);
    throw;
  }
}

flight::Call SendRecv::record(const SendRecvOp& op) const {
  if (log_ == nullptr || !op.is_users()) return {};
  return log_->begin({.seq = op.tag,
                      .num_bytes = op.num_bytes,
                      .peer = std::max(op.awaited, -1),
                      .op = op.is_send() ? OpKind::kSend : OpKind::kRecv});
}

void SendRecv::trace_begin(SendRecvOp& op) const {
  static std::atomic<std::uint64_t> num_messages = 0;
  op.traced = {.begin_ns = trace::now_ns(),
               .seq = num_messages.fetch_add(1, std::memory_order_relaxed),
               .num_bytes = op.num_bytes,
               .group = trace_group_,
               .to = op.is_send() ? op.peer : -1,
               .from = op.is_send() ? -1 : op.peer,
               .chunk = op.is_users() ? static_cast<std::int32_t>(op.tag) : -1,
               .kind = trace::Kind::kMessage,
               .name = trace::name_number(op.is_send() ? "send" : "recv")};
  trace::add(op.traced);  // without an end: of a process that is killed there is nothing else
}

void SendRecv::record_end(const SendRecvOp& op) {
  flight::Log::end(op.recorded);
  if (op.traced.group == trace::kNoGroup) return;
  trace::Event event = op.traced;
  if (!op.is_send()) event.from = op.peer;  // of a receive from any source it is known now
  event.end_ns = trace::now_ns();
  trace::add(event);
}

bool SendRecv::wait(const SendRecvOpPtr& op, Clock::time_point deadline,
                    const Interrupted& is_interrupted) {
  failure_.check_not_inherited();
  // Later calls may have taken its place since it was posted.
  const flight::Call shown = op->recorded.is_there() ? op->recorded : record(*op);
  shown.record_wait(op->awaited);
  const trace::Span waits([&] {
    return trace::Event{.group = trace_group_,
                        .from = op->is_send() ? op->peer : op->traced.from,
                        .kind = trace::Kind::kWait,
                        .name = trace::name_number("wait")};
  });
  const std::uint64_t begin = flight::ticks();
  const bool is_done = await(op, deadline, is_interrupted);
  if (!is_done) shown.record_wait(flight::kNobody);
  if (shown.number != op->recorded.number) flight::Log::end(shown);
  // Once it is done, no other thread sets the peer.
  if (log_ != nullptr)
    log_->count_wait(is_done ? op->peer : op->awaited, flight::long_wait_since(begin));
  return is_done;
}

void SendRecv::check_open(const SendRecvOp& op) const {
  failure_.rethrow_if_any();
  if (is_stopping_) std::rethrow_exception(orphaned(op));
}

void SendRecv::abort_if(Lock& lock, const Interrupted& is_interrupted) {
  lock.unlock();
  if (is_interrupted && is_interrupted())
    failure_.abort("interrupted by a signal in a send or receive");
  lock.lock();
}

void SendRecv::conclude(Lock& lock, std::span<const SendRecvOpPtr> ops) {
  for (const SendRecvOpPtr& op : ops) {
    if (op->error != nullptr || !op->is_users()) continue;
    const std::uint64_t sent = op->is_send() ? op->num_bytes : 0;
    stats_.count(op->is_send() ? OpKind::kSend : OpKind::kRecv, {.sent_bytes = sent});
    if (log_ != nullptr) log_->count_bytes(op->peer, sent, op->num_bytes - sent);
  }
  has_news_.notify_all();
  lock.unlock();
  for (const SendRecvOpPtr& op : ops) {
    record_end(*op);
    if (const auto done = std::exchange(op->done, nullptr)) done();
  }
  lock.lock();
}

void SendRecv::raise_misfit(const SendRecvOp& receive, std::uint64_t sent_bytes) {
  failure_.raise_mismatch(receive.peer,
                          "rank " + std::to_string(receive.peer) + " sent " +
                              std::to_string(sent_bytes) + " bytes with this tag, where rank " +
                              std::to_string(rank_) + " receives " +
                              std::to_string(receive.num_bytes),
                          activity_of(receive));
}

std::exception_ptr SendRecv::orphaned(const SendRecvOp& op) const {
  const Activity activity = activity_of(op);
  return std::make_exception_ptr(
      Error({.kind = ErrorKind::kAborted, .rank = rank_, .op = activity.op},
            "ringcomm: " + activity.description + ": the group was destroyed before " +
                (op.is_send() ? "it was sent" : "a message arrived")));
}

Activity activity_of(const SendRecvOp& op) {
  const std::string peer = op.peer >= 0 ? "rank " + std::to_string(op.peer) : "any rank";
  return {.op = op.is_send() ? "send" : "recv",
          .description = (op.is_send() ? "send to " : "recv from ") + peer + " (tag " +
                         std::to_string(op.tag) + ", " + std::to_string(op.num_bytes) + " bytes)",
          .timeout = op.timeout};
}

}  // namespace ringcomm
