#include "transport/messages/context.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "collectives/op_kind.h"
#include "collectives/trace.h"

namespace ringcomm {

// A message takes as long as a long wait, so a rank whose message took ten times that was late.
constexpr std::uint64_t kLateTimes = 10;

MessageContext::Handle MessageContext::irecv(int peer, int tag, void* data, std::size_t num_bytes) {
  return posted_.insert(
      posted_.end(), {messenger_.irecv(peer, tag, static_cast<std::byte*>(data), num_bytes), peer});
}

MessageContext::Handle MessageContext::isend(int peer, int tag, const void* data,
                                             std::size_t num_bytes) {
  return posted_.insert(
      posted_.end(),
      {messenger_.isend(peer, tag, static_cast<const std::byte*>(data), num_bytes), peer});
}

void MessageContext::wait(Handle message, bool is_arrival) {
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
  posted_.erase(message);
}

std::byte* MessageContext::stage(std::size_t num_bytes) {
  staging_.push_back(std::make_unique_for_overwrite<std::byte[]>(num_bytes));
  return staging_.back().get();
}

MessageEnvelope& MessageExchange::free_envelope() {
  if (num_used_ == envelopes_.size())
    envelopes_.push_back(new (context_.stage(sizeof(MessageEnvelope))) MessageEnvelope);
  return *envelopes_[num_used_++];
}

void MessageExchange::send(int peer, const void* data, std::size_t num_bytes) {
  MessageEnvelope& envelope = free_envelope();
  envelope.header = header_;
  envelope.num_bytes = num_bytes;
  if (envelope.is_whole() && num_bytes > 0) std::memcpy(envelope.data.data(), data, num_bytes);
  sends_.push_back(
      context_.isend(peer, MessageTags::kEnvelope, &envelope, envelope.message_bytes()));
  const auto send_data = [=, this] {
    sends_.push_back(context_.isend(peer, MessageTags::of_data(num_bytes), data, num_bytes));
  };
  if (num_bytes > MessageTags::kMaxSized)
    late_sends_.push_back({peer, send_data});
  else if (!envelope.is_whole())
    send_data();
}

void MessageExchange::recv(int peer, void* data, std::size_t num_bytes) {
  MessageEnvelope& envelope = free_envelope();
  incoming_.push_back({.peer = peer,
                       .data = data,
                       .num_bytes = num_bytes,
                       .envelope = &envelope,
                       .envelope_message = context_.irecv(peer, MessageTags::kEnvelope, &envelope,
                                                          sizeof(MessageEnvelope)),
                       .data_message = {}});
  if (num_bytes > sizeof(envelope.data) && num_bytes <= MessageTags::kMaxSized)
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
  num_used_ = 0;
}

void MessageExchange::open(Incoming& incoming) {
  const auto& [peer, data, num_bytes, envelope, envelope_message, data_message] = incoming;
  context_.wait(envelope_message, /*is_arrival=*/true);
  if (!is_compatible(envelope->header, header_))
    throw Mismatched{.peer = peer, .theirs = envelope->header};
  if (envelope->num_bytes != num_bytes)
    throw Mismatched{
        .peer = peer,
        .theirs = envelope->header,
        .difference = size_difference(peer, envelope->num_bytes, context_.rank(), num_bytes)};
  if (envelope->is_whole() && num_bytes > 0)
    std::memcpy(data, envelope->data.data(), num_bytes);
  else if (!envelope->is_whole() && !data_message)
    incoming.data_message = context_.irecv(peer, MessageTags::of_data(num_bytes), data, num_bytes);
}

bool is_compatible(const CallHeader& a, const CallHeader& b) {
  const bool has_shards =
      a.op == OpKind::kReduceScatter || a.op == OpKind::kAllGather || has_private_sizes(a.op);
  return has_shards ? is_same_call(a, b) : a == b;
}

}  // namespace ringcomm
