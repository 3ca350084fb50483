#include "transport/messages/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "collectives/call.h"

namespace ringcomm {

// A message takes as long as a long wait, so a rank whose message took ten times that was late.
constexpr double kLateTimes = 10;

MessageExchange::MessageExchange(Messenger& messenger, MessageGroup& group, MessageMemory& memory,
                                 const CallHeader& header, MessageGroup::Clock::time_point deadline)
    : messenger_(messenger),
      group_(group),
      memory_(memory),
      header_(header),
      operation_(group, deadline),
      has_sent_(static_cast<std::size_t>(messenger.world_size())),
      has_received_(has_sent_) {
  step() = {};
}

std::byte* MessageExchange::stage(std::size_t num_bytes) {
  if (memory_.staging.size() == num_staged_) memory_.staging.emplace_back();
  std::vector<std::byte>& buffer = memory_.staging[num_staged_++];
  if (buffer.size() < num_bytes) buffer = std::vector<std::byte>(num_bytes);
  return buffer.data();
}

bool MessageExchange::takes_envelope(std::vector<bool>& has_met, int peer, std::size_t num_bytes) {
  const auto idx = static_cast<std::size_t>(peer);
  const bool is_first = !has_met[idx];
  has_met[idx] = true;
  return is_first || num_bytes <= sizeof(MessageEnvelope::data) ||
         num_bytes > MessageTags::kMaxSized;
}

void MessageExchange::send(int peer, const void* data, std::size_t num_bytes) {
  if (data != nullptr) sent_bytes_ += num_bytes;
  if (data != nullptr && num_bytes > 0) group_.record({.rank = peer, .sent_bytes = num_bytes});
  auto* const bytes = const_cast<std::byte*>(static_cast<const std::byte*>(data));
  Transfer& outgoing = batch_->outgoing.emplace_back(Transfer{true, peer, bytes, num_bytes});
  if (takes_envelope(has_sent_, peer, num_bytes)) {
    auto envelope = std::make_unique_for_overwrite<MessageEnvelope>();
    envelope->header = header_;
    envelope->num_bytes = num_bytes;
    if (envelope->is_whole() && num_bytes > 0) std::memcpy(envelope->data.data(), data, num_bytes);
    outgoing.envelope.message =
        messenger_.isend(peer, MessageTags::kEnvelope, reinterpret_cast<std::byte*>(envelope.get()),
                         envelope->message_bytes());
    outgoing.envelope.envelope = std::move(envelope);
  }
  if (outgoing.has_message() && !outgoing.is_long()) start_data(outgoing);
}

void MessageExchange::recv(int peer, void* data, std::size_t num_bytes) {
  if (data != nullptr && num_bytes > 0) group_.record({.rank = peer, .received_bytes = num_bytes});
  Transfer& incoming = batch_->incoming.emplace_back(
      Transfer{false, peer, static_cast<std::byte*>(data), num_bytes});
  if (takes_envelope(has_received_, peer, num_bytes)) {
    MessageMemory::PostedReceive& next = memory_.posted[static_cast<std::size_t>(peer)];
    incoming.envelope = next.message != nullptr
                            ? std::exchange(next, {})
                            : receive_of(peer, std::make_unique_for_overwrite<MessageEnvelope>());
  }
  if (incoming.has_message() && !incoming.is_long()) start_data(incoming);
}

MessageMemory::PostedReceive MessageExchange::receive_of(
    int peer, std::unique_ptr<MessageEnvelope> envelope) {
  auto* const bytes = reinterpret_cast<std::byte*>(envelope.get());
  auto message = messenger_.irecv(peer, MessageTags::kEnvelope, bytes, sizeof(MessageEnvelope));
  return {std::move(envelope), std::move(message)};
}

void MessageExchange::start_data(Transfer& transfer) {
  const auto& [is_send, peer, data, num_bytes, envelope, message] = transfer;
  const int tag = MessageTags::of_data(num_bytes);
  transfer.message = is_send ? messenger_.isend(peer, tag, data, num_bytes)
                             : messenger_.irecv(peer, tag, data, num_bytes);
}

void MessageExchange::finish() {
  auto& [incoming, outgoing] = *batch_;
  // Long data starts once long data of the same peer is expected.
  const auto start_long = [&](bool is_after_open) {
    for (Transfer& send : outgoing) {
      const bool waits = std::ranges::any_of(incoming, [&](const Transfer& recv) {
        return recv.peer == send.peer && recv.is_long() && recv.has_message();
      });
      const bool is_new = send.message == nullptr && send.has_message();
      if (send.is_long() && is_new && waits == is_after_open) start_data(send);
    }
  };
  start_long(false);
  for (Transfer& transfer : incoming)
    if (transfer.peer == first_) open(transfer);
  for (Transfer& transfer : incoming) open(transfer);
  start_long(true);
  if (!incoming.empty()) is_arriving_ = false;
  for (const Transfer& transfer : incoming) wait(transfer.message.get(), transfer.peer);
  incoming.clear();
}

void MessageExchange::finish_sends() {
  for (const Transfer& transfer : batch_->outgoing) {
    wait(transfer.envelope.message.get(), transfer.peer);
    wait(transfer.message.get(), transfer.peer);
  }
  batch_->outgoing.clear();
}

void MessageExchange::finish_all() {
  for (const std::size_t number : {0U, 1U}) {
    use_batch(number);
    finish();
    finish_sends();
  }
}

void MessageExchange::open(Transfer& incoming) {
  const int peer = incoming.peer;
  if (incoming.envelope.message == nullptr) return;
  wait(incoming.envelope.message.get(), peer, /*is_arrival=*/true);
  auto envelope = std::exchange(incoming.envelope, {}).envelope;
  const CallHeader& theirs = envelope->header;
  const bool is_same = is_same_call(theirs, header_);
  if (is_same && has_shards(theirs.op) && envelope->num_bytes != incoming.num_bytes)
    throw Mismatched{.peer = peer,
                     .theirs = theirs,
                     .difference = size_difference(peer, envelope->num_bytes, messenger_.rank(),
                                                   incoming.num_bytes)};
  if (has_private_sizes(theirs.op) ? !is_same : theirs != header_) {
    // Of an earlier call, in which this rank only sent: the rank that has checked it names both.
    if (theirs.seq < header_.seq &&
        operation_.stop_of(MessageEnd::kDone, peer) == WaitStatus::kAborted)
      throw WaitFailed{.status = WaitStatus::kAborted, .peer = peer};
    throw Mismatched{.peer = peer, .theirs = theirs};
  }
  if (incoming.has_message() && incoming.message == nullptr) start_data(incoming);
  if (envelope->is_whole() && incoming.num_bytes > 0)
    std::memcpy(incoming.data, envelope->data.data(), incoming.num_bytes);
  MessageMemory::PostedReceive& next = memory_.posted[static_cast<std::size_t>(peer)];
  if (messenger_.announces_receives() && next.message == nullptr)
    next = receive_of(peer, std::move(envelope));
}

// Returns when the message is done, if there is one. Throws WaitFailed naming the peer.
void MessageExchange::wait(Message* message, int peer, bool is_arrival) {
  if (message == nullptr) return;
  operation_.await(peer);
  PeerEvent waits{.rank = peer, .begin_ticks = ticks()};
  group_.record(waits);
  const MessageEnd end = message->wait();
  waits.end_ticks = ticks();
  waits.is_arrival = is_arrival && is_arriving_ &&
                     ns_of(waits.end_ticks - waits.begin_ticks) >= kLateTimes * kLongWait_ns;
  group_.record(waits);
  if (end != MessageEnd::kDone)
    throw WaitFailed{.status = operation_.stop_of(end, peer),
                     .peer = peer,
                     .detail = end == MessageEnd::kFailed ? message->failure() : ""};
}

}  // namespace ringcomm
