#include "collectives/messages/engine.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <string>

#include "collectives/messages/shares.h"
#include "collectives/trace.h"

namespace ringcomm {
namespace {

// Completed sends hold memory until they are waited for. Beyond this number the oldest is waited
// for. This cannot deadlock: a receiver posts the receive of an older send before it handles a
// younger one, and a ring has fewer slots.
constexpr std::size_t kMaxSends = 256;

std::string bytes_text(std::uint64_t num_bytes) { return std::to_string(num_bytes) + " bytes"; }
std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

std::vector<int> all_ranks(int world_size) {
  std::vector<int> ranks(static_cast<std::size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

MessageEngine::MessageEngine(MessageTransport& transport, const Cut& cut)
    : transport_(transport), cut_(cut) {
  renumber(all_ranks(transport.world_size()));
}

void MessageEngine::renumber(std::vector<int> ranks) {
  ranks_ = std::move(ranks);
  rank_ =
      static_cast<int>(std::find(ranks_.begin(), ranks_.end(), transport_.rank()) - ranks_.begin());
}

MessageEngine::Handle MessageEngine::irecv(int peer, int tag, void* data, std::size_t num_bytes) {
  const int from = whole_rank(peer);
  return posted_.insert(
      posted_.end(), {transport_.irecv(from, tag, static_cast<std::byte*>(data), num_bytes), from});
}

MessageEngine::Handle MessageEngine::isend(int peer, int tag, const void* data,
                                           std::size_t num_bytes) {
  const int to = whole_rank(peer);
  return posted_.insert(
      posted_.end(),
      {transport_.isend(to, tag, static_cast<const std::byte*>(data), num_bytes), to});
}

void MessageEngine::wait(Handle message) {
  const trace::Span traced([&] {
    return trace::Event{
        .from = message->peer, .kind = trace::Kind::kWait, .name = trace::name_number("wait")};
  });
  operation_->await(message->peer);
  const MessageEnd end = message->message->wait();
  if (end != MessageEnd::kDone)
    throw Stopped{.stop = operation_->stop_of(end, message->peer),
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

MessageEnvelope& MessageExchange::free_envelope() {
  if (num_used_ == envelopes_.size())
    envelopes_.push_back(new (engine_.stage(sizeof(MessageEnvelope))) MessageEnvelope{});
  return *envelopes_[num_used_++];
}

void MessageExchange::send(int peer, const void* data, std::size_t num_bytes) {
  MessageEnvelope& envelope = free_envelope();
  envelope.header = header_;
  envelope.num_bytes = num_bytes;
  if (envelope.is_whole() && num_bytes > 0) std::memcpy(envelope.data.data(), data, num_bytes);
  sends_.push_back(engine_.isend(peer, MessageTags::kEnvelope, &envelope, sizeof(MessageEnvelope)));
  if (!envelope.is_whole())
    sends_.push_back(engine_.isend(peer, MessageTags::of_data(num_bytes), data, num_bytes));
}

void MessageExchange::recv(int peer, void* data, std::size_t num_bytes) {
  MessageEnvelope& envelope = free_envelope();
  incoming_.push_back({.peer = peer,
                       .data = data,
                       .num_bytes = num_bytes,
                       .envelope = &envelope,
                       .envelope_message = engine_.irecv(peer, MessageTags::kEnvelope, &envelope,
                                                         sizeof(MessageEnvelope)),
                       .data_message = {}});
  if (num_bytes > sizeof(envelope.data) && num_bytes <= MessageTags::kMaxSized)
    incoming_.back().data_message =
        engine_.irecv(peer, MessageTags::of_data(num_bytes), data, num_bytes);
}

std::size_t MessageExchange::send_part(const Collective& call, int peer) {
  const auto part = part_given(call, engine_.rank(), peer);
  if (!part) return 0;
  const std::size_t num_bytes = part->num_elems * element_bytes(call.dtype);
  const void* data = part->data;
  const bool is_in_place = call.op == OpKind::kAllToAll && data == call.outputs[peer];
  if (is_in_place && num_bytes > 0) data = std::memcpy(engine_.stage(num_bytes), data, num_bytes);
  send(peer, data, num_bytes);
  return num_bytes;
}

void MessageExchange::recv_part(const Collective& call, int peer) {
  if (const auto part = part_taken(call, engine_.rank(), peer))
    recv(peer, part->data, part->num_elems * element_bytes(call.dtype));
}

void MessageExchange::finish() {
  for (Incoming& incoming : incoming_) {
    engine_.wait(incoming.envelope_message);
    check(incoming);
    if (!incoming.envelope->is_whole() && !incoming.data_message)
      incoming.data_message = engine_.irecv(incoming.peer, MessageTags::of_data(incoming.num_bytes),
                                            incoming.data, incoming.num_bytes);
    else if (incoming.envelope->is_whole() && incoming.num_bytes > 0)
      std::memcpy(incoming.data, incoming.envelope->data.data(), incoming.num_bytes);
  }
  for (const Incoming& incoming : incoming_)
    if (incoming.data_message) engine_.wait(*incoming.data_message);
  for (const MessageEngine::Handle send : sends_) engine_.wait(send);
  incoming_.clear();
  sends_.clear();
  num_used_ = 0;
}

void MessageExchange::check(const Incoming& incoming) const {
  const MessageEnvelope& envelope = *incoming.envelope;
  const int from = engine_.whole_rank(incoming.peer);
  if (!is_compatible(envelope.header, header_))
    throw Mismatched{.peer = from, .theirs = envelope.header};
  if (envelope.num_bytes != incoming.num_bytes)
    throw Mismatched{
        .peer = from,
        .theirs = envelope.header,
        .difference = size_difference(from, envelope.num_bytes, engine_.whole_rank(engine_.rank()),
                                      incoming.num_bytes)};
}

void greet_neighbours(MessageEngine& engine, const CallHeader& header,
                      const std::vector<std::uint64_t>& table) {
  const int world_size = engine.world_size();
  const int previous = (engine.rank() + world_size - 1) % world_size;
  const std::size_t num_bytes = table.size() * sizeof(std::uint64_t);
  // The engine's: the transport may still use them when an exception has left this function.
  std::byte* sent = engine.stage(num_bytes);
  std::byte* received = engine.stage(num_bytes);
  if (num_bytes > 0) std::memcpy(sent, table.data(), num_bytes);
  MessageExchange exchange(engine, header);
  exchange.recv(previous, received, num_bytes);
  exchange.send((engine.rank() + 1) % world_size, sent, num_bytes);
  exchange.finish();
  for (std::size_t owner = 0; owner < table.size(); ++owner) {
    std::uint64_t theirs = 0;
    std::memcpy(&theirs, received + owner * sizeof(theirs), sizeof(theirs));
    if (theirs == table[owner]) continue;
    const int from = engine.whole_rank(previous);
    throw Mismatched{.peer = from,
                     .theirs = header,
                     .difference = table_difference(
                         owner, from, theirs, engine.whole_rank(engine.rank()), table[owner])};
  }
}

bool is_compatible(const CallHeader& a, const CallHeader& b) {
  const bool has_shares =
      a.op == OpKind::kReduceScatter || a.op == OpKind::kAllGather || has_private_sizes(a.op);
  return has_shares ? is_same_call(a, b) : a == b;
}

std::string size_difference(int from, std::uint64_t has_bytes, int to,
                            std::uint64_t expects_bytes) {
  return rank_text(from) + " has " + bytes_text(has_bytes) + " for " + rank_text(to) +
         ", which expects " + bytes_text(expects_bytes);
}

std::string table_difference(std::size_t owner, int a, std::uint64_t a_bytes, int b,
                             std::uint64_t b_bytes) {
  return "the share of " + rank_text(static_cast<int>(owner)) + " has " + bytes_text(a_bytes) +
         " for " + rank_text(a) + ", and " + bytes_text(b_bytes) + " for " + rank_text(b);
}

}  // namespace ringcomm
