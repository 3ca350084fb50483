#include "collectives/send_recv.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "collectives/call.h"

namespace ringcomm {

void SendRecv::post(const SendRecvOpPtr& op) {
  const int least = op->is_send() ? 0 : -1;  // -1: from any source
  if (op->peer < least || op->peer >= world_size_ || op->peer == rank_)
    throw std::invalid_argument(
        "the peer of a send or receive must be another rank of the group's " +
        std::to_string(world_size_) + ", got " + std::to_string(op->peer));
  failure_.check_not_inherited();  // before a lock that may have been held at the fork
  if (op->peer >= 0) op->awaited = op->peer;
  op->begin_ticks = ticks();
  op->recorded = record(*op);
  op->traced = recorder::trace(event_of(*op));  // without an end, as one of a killed process
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

recorder::Event SendRecv::event_of(const SendRecvOp& op) const {
  return {.begin_ticks = op.begin_ticks,
          .seq = op.tag,
          .num_bytes = op.num_bytes,
          .group = group_,
          .peer = recorder::rank16(op.peer),
          .kind = recorder::Kind::kMessage,
          .op = op.kind};
}

recorder::Call SendRecv::record(const SendRecvOp& op) const {
  if (log_ == nullptr || op.is_internal()) return {};
  recorder::Event event = event_of(op);
  event.peer = recorder::rank16(std::max(op.awaited, -1));
  return log_->begin(event);
}

void SendRecv::record_end(const SendRecvOp& op) const {
  op.recorded.end();
  if (op.traced.event == nullptr) return;
  // Later events may have taken its place. The peer of any source is known now.
  const recorder::Call shown = op.traced.is_there() ? op.traced : recorder::trace(event_of(op));
  shown.set_peer(op.peer);
  shown.end();
}

void SendRecv::begin_timeout(const SendRecvOpPtr& op) {
  if (failure_.is_inherited()) return;
  const Lock lock = enter();
  begin_timeout_of(*op);
}

void SendRecv::begin_timeout_of(SendRecvOp& op) {
  if (op.is_done || op.deadline != Clock::time_point::max()) return;
  op.deadline = deadline_after(op.timeout);
  on_deadline(op);
}

bool SendRecv::wait(const SendRecvOpPtr& op, Clock::time_point deadline,
                    const Interrupted& is_interrupted) {
  failure_.check_not_inherited();
  // Later calls may have taken its place since it was posted.
  const recorder::Call shown = op->recorded.is_there() ? op->recorded : record(*op);
  shown.record_wait(op->awaited);
  const recorder::Span waits([&] {
    return recorder::Event{.seq = recorder::kNoSeq,
                           .group = group_,
                           .waits_for = recorder::rank16(std::max(op->awaited, -1)),
                           .kind = recorder::Kind::kWait};
  });
  const std::uint64_t begin = ticks();
  WaitGuard guard = guard_of(is_interrupted, deadline);
  const bool is_done = await(op, guard);
  if (!is_done) shown.record_wait(recorder::kNobody);
  if (shown.number != op->recorded.number) shown.end();
  // Once it is done, no other thread sets the peer.
  if (log_ != nullptr)
    log_->count_wait(is_done ? op->peer : op->awaited, long_wait_ns(ticks() - begin));
  return is_done;
}

void SendRecv::check_open(const SendRecvOp& op) const {
  failure_.rethrow_if_any();
  if (is_stopping_) std::rethrow_exception(error_of_close(op));
}

WaitGuard SendRecv::guard_of(const Interrupted& is_interrupted, Clock::time_point deadline) {
  return WaitGuard(deadline, [this, &is_interrupted] {
    const SendRecv* const outer = std::exchange(polled_, this);
    const bool is_over = is_interrupted && is_interrupted();
    polled_ = outer;
    if (is_over) failure_.abort("interrupted by a signal in a send or receive");
    return is_over;
  });
}

void SendRecv::conclude(Lock& lock, std::span<const SendRecvOpPtr> ops) {
  for (const SendRecvOpPtr& op : ops) {
    if (op->error != nullptr || op->is_internal()) continue;
    const std::uint64_t sent = op->is_send() ? op->num_bytes : 0;
    stats_.count(op->kind, {.sent_bytes = sent});
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

std::exception_ptr SendRecv::error_of_close(const SendRecvOp& op) const {
  const Activity activity = activity_of(op);
  return std::make_exception_ptr(
      Error({.kind = ErrorKind::kAborted, .rank = rank_, .op = activity.op},
            "ringcomm: " + activity.description + ": the group was destroyed before " +
                (op.is_send() ? "it was sent" : "a message arrived")));
}

Activity activity_of(const SendRecvOp& op) {
  const std::string peer = op.peer >= 0 ? "rank " + std::to_string(op.peer) : "any rank";
  return {.op = name_of(op.kind),
          .description = (op.is_send() ? "send to " : "recv from ") + peer + " (tag " +
                         std::to_string(op.tag) + ", " + std::to_string(op.num_bytes) + " bytes)",
          .timeout = op.timeout};
}

}  // namespace ringcomm
