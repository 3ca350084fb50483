#include "transport/messages/context.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "collectives/op_kind.h"
#include "collectives/trace.h"

namespace ringcomm {

// A message takes as long as a long wait, so a rank whose message took ten times that was late.
constexpr std::uint64_t kLateTimes = 10;

MessageContext::Handle MessageContext::irecv(int peer, int tag, void* data, std::size_t num_bytes) {
  return keep({{}, messenger_.irecv(peer, tag, static_cast<std::byte*>(data), num_bytes), peer});
}

MessageContext::Handle MessageContext::isend(int peer, int tag, const void* data,
                                             std::size_t num_bytes) {
  const auto* const bytes = static_cast<const std::byte*>(data);
  return keep({{}, messenger_.isend(peer, tag, bytes, num_bytes), peer});
}

MessageContext::Handle MessageContext::isend(int peer, std::unique_ptr<MessageEnvelope> envelope) {
  const Handle sent =
      isend(peer, MessageTags::kEnvelope, envelope.get(), envelope->message_bytes());
  sent->envelope = std::move(envelope);
  return sent;
}

PostedMessage MessageContext::receive_of(int peer, std::unique_ptr<MessageEnvelope> envelope) {
  auto* const bytes = reinterpret_cast<std::byte*>(envelope.get());
  auto message = messenger_.irecv(peer, MessageTags::kEnvelope, bytes, sizeof(MessageEnvelope));
  return {std::move(envelope), std::move(message), peer};
}

MessageContext::Handle MessageContext::irecv_envelope(int peer) {
  PostedMessage& ahead = ahead_[static_cast<std::size_t>(peer)];
  if (ahead.message != nullptr) return keep(std::exchange(ahead, {}));
  return keep(receive_of(peer, std::make_unique_for_overwrite<MessageEnvelope>()));
}

void MessageContext::post_ahead(int peer, std::unique_ptr<MessageEnvelope> envelope) {
  PostedMessage& ahead = ahead_[static_cast<std::size_t>(peer)];
  if (messenger_.announces_receives() && ahead.message == nullptr)
    ahead = receive_of(peer, std::move(envelope));
}

std::unique_ptr<MessageEnvelope> MessageContext::wait(Handle message, bool is_arrival) {
  const recorder::Span traced([&] {
    return recorder::Event{.waits_for = recorder::rank16(message->peer),
                           .kind = recorder::Kind::kWait};
  });
  members_.record({message->peer});
  operation_.await(message->peer);
  const std::uint64_t begin = ticks();
  const MessageEnd end = message->message->wait();
  if (const std::uint64_t waited_ns = long_wait_ns(ticks() - begin); waited_ns > 0)
    members_.record({message->peer, waited_ns,
                     is_arrival && is_arriving_ &&
                         static_cast<double>(waited_ns) >= kLateTimes * kLongWait_ns});
  if (end != MessageEnd::kDone)
    throw Stopped{.stop = operation_.stop_of(end, message->peer),
                  .peer = message->peer,
                  .detail = end == MessageEnd::kFailed ? message->message->failure() : ""};
  std::unique_ptr<MessageEnvelope> envelope = std::move(message->envelope);
  posted_.erase(message);
  return envelope;
}

void MessageContext::raise_if_reported(int peer) {
  const Stop stop = operation_.stop_of(MessageEnd::kDone, peer);
  if (stop == Stop::kAborted) throw Stopped{.stop = stop, .peer = peer};
}

std::byte* MessageContext::stage(std::size_t num_bytes) {
  staging_.push_back(std::make_unique_for_overwrite<std::byte[]>(num_bytes));
  return staging_.back().get();
}

void MessageExchange::send(int peer, const void* data, std::size_t num_bytes) {
  auto envelope = std::make_unique_for_overwrite<MessageEnvelope>();
  envelope->header = header_;
  envelope->num_bytes = num_bytes;
  const bool is_whole = envelope->is_whole();
  if (is_whole && num_bytes > 0) std::memcpy(envelope->data.data(), data, num_bytes);
  sends_.push_back(context_.isend(peer, std::move(envelope)));
  const auto send_data = [=, this] {
    sends_.push_back(context_.isend(peer, MessageTags::of_data(num_bytes), data, num_bytes));
  };
  if (num_bytes > MessageTags::kMaxSized)
    late_sends_.push_back({peer, send_data});
  else if (!is_whole)
    send_data();
}

void MessageExchange::recv(int peer, void* data, std::size_t num_bytes) {
  incoming_.push_back({.peer = peer,
                       .data = data,
                       .num_bytes = num_bytes,
                       .envelope = context_.irecv_envelope(peer),
                       .data_message = {}});
  if (num_bytes > sizeof(MessageEnvelope::data) && num_bytes <= MessageTags::kMaxSized)
    incoming_.back().data_message =
        context_.irecv(peer, MessageTags::of_data(num_bytes), data, num_bytes);
}

void MessageExchange::finish() {
  const auto expects_long = [&](const LateSend& send) {
    return std::ranges::any_of(incoming_, [&](const Incoming& incoming) {
      return incoming.peer == send.peer && incoming.num_bytes > MessageTags::kMaxSized;
    });
  };
  for (const LateSend& send : late_sends_)
    if (!expects_long(send)) send.start();
  for (Incoming& incoming : incoming_) open(incoming);
  for (const LateSend& send : late_sends_)
    if (expects_long(send)) send.start();
  if (!incoming_.empty()) context_.end_arrivals();
  for (const Incoming& incoming : incoming_)
    if (incoming.data_message) context_.wait(*incoming.data_message);
  for (const MessageContext::Handle send : sends_) context_.wait(send);
  incoming_.clear();
  late_sends_.clear();
  sends_.clear();
}

void MessageExchange::open(Incoming& incoming) {
  const auto& [peer, data, num_bytes, message, data_message] = incoming;
  auto envelope = context_.wait(message, /*is_arrival=*/true);
  if (!is_compatible(envelope->header, header_)) {
    // Of an earlier call, in which this rank only sent: the rank that has checked it names both.
    if (envelope->header.seq < header_.seq) context_.raise_if_reported(peer);
    throw Mismatched{.peer = peer, .theirs = envelope->header};
  }
  if (envelope->num_bytes != num_bytes)
    throw Mismatched{
        .peer = peer,
        .theirs = envelope->header,
        .difference = size_difference(peer, envelope->num_bytes, context_.rank(), num_bytes)};
  if (envelope->is_whole() && num_bytes > 0)
    std::memcpy(data, envelope->data.data(), num_bytes);
  else if (!envelope->is_whole() && !data_message)
    incoming.data_message = context_.irecv(peer, MessageTags::of_data(num_bytes), data, num_bytes);
  context_.post_ahead(peer, std::move(envelope));
}

bool is_compatible(const CallHeader& a, const CallHeader& b) {
  const bool has_shards =
      a.op == OpKind::kReduceScatter || a.op == OpKind::kAllGather || has_private_sizes(a.op);
  return has_shards ? is_same_call(a, b) : a == b;
}

}  // namespace ringcomm
