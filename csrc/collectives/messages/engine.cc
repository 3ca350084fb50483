#include "collectives/messages/engine.h"

#include <utility>

#include "collectives/trace.h"

namespace ringcomm {
namespace {

// Completed sends hold memory until they are waited for. Beyond this number the oldest is waited
// for. This cannot deadlock: a receiver posts the receive of an older send before it handles a
// younger one, and a ring has fewer slots.
constexpr std::size_t kMaxSends = 256;

}  // namespace

MessageEngine::Handle MessageEngine::keep(MessageTransport::MessagePtr message, int peer) {
  return posted_.insert(posted_.end(), {std::move(message), peer});
}

MessageEngine::Handle MessageEngine::irecv(int peer, int tag, void* data, std::size_t num_bytes) {
  return keep(transport_.irecv(peer, tag, static_cast<std::byte*>(data), num_bytes), peer);
}

MessageEngine::Handle MessageEngine::isend(int peer, int tag, const void* data,
                                           std::size_t num_bytes) {
  return keep(transport_.isend(peer, tag, static_cast<const std::byte*>(data), num_bytes), peer);
}

void MessageEngine::wait(Handle message) {
  const int whole_rank = this->whole_rank(message->peer);
  const trace::Span traced([&] {
    return trace::Event{
        .from = whole_rank, .kind = trace::Kind::kWait, .name = trace::name_number("wait")};
  });
  operation_->await(whole_rank);
  const MessageEnd end = message->message->wait();
  if (end != MessageEnd::kDone)
    throw Stopped{.stop = operation_->stop_of(end, whole_rank),
                  .peer = message->peer,
                  .detail = end == MessageEnd::kFailed ? message->message->failure() : ""};
  posted_.erase(message);
}

void MessageEngine::post_send(int peer, int tag, const void* data, std::size_t num_bytes) {
  sends_.push_back(isend(peer, tag, data, num_bytes));
  if (sends_.size() <= kMaxSends) return;
  wait(sends_.front());
  sends_.pop_front();
}

std::byte* MessageEngine::stage(std::size_t num_bytes) {
  staging_.push_back(std::make_unique_for_overwrite<std::byte[]>(num_bytes));
  return staging_.back().get();
}

void MessageEngine::finish() {
  for (; !sends_.empty(); sends_.pop_front()) wait(sends_.front());
  drop();
}

void MessageEngine::drop() {
  sends_.clear();
  posted_.clear();
  staging_.clear();
  operation_ = nullptr;
}

}  // namespace ringcomm
