#include "collectives/messages/exchange.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

namespace ringcomm {
namespace {

// Where ranks may have shares of different sizes, the pairs' sizes are compared instead.
bool has_shares(OpKind op) {
  return op == OpKind::kReduceScatter || op == OpKind::kAllGather || op == OpKind::kGather ||
         op == OpKind::kScatter || op == OpKind::kAllToAll;
}

bool is_compatible(const CallHeader& a, const CallHeader& b) {
  return has_shares(a.op) ? is_same_call(a, b) : a == b;
}

std::string bytes_text(std::uint64_t num_bytes) { return std::to_string(num_bytes) + " bytes"; }

}  // namespace

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
    sends_.push_back(engine_.isend(peer, MessageTags::kData, data, num_bytes));
}

void MessageExchange::recv(int peer, void* data, std::size_t num_bytes) {
  MessageEnvelope& envelope = free_envelope();
  incoming_.push_back(
      {.peer = peer,
       .data = data,
       .num_bytes = num_bytes,
       .envelope = &envelope,
       .message = engine_.irecv(peer, MessageTags::kEnvelope, &envelope, sizeof(MessageEnvelope))});
}

std::size_t MessageExchange::swap_shares(const Collective& call, int peer) {
  const std::size_t bytes = element_bytes(call.dtype);
  const std::size_t num_bytes = call.input_share(peer) * bytes;
  const void* input = call.inputs[peer];
  if (input == call.outputs[peer] && num_bytes > 0)  // the receive may complete before the send
    input = std::memcpy(engine_.stage(num_bytes), input, num_bytes);
  recv(peer, call.outputs[peer], call.output_share(peer) * bytes);
  send(peer, input, num_bytes);
  return num_bytes;
}

void MessageExchange::finish() {
  const int world_size = engine_.world_size();
  const auto distance = [&](const Incoming& incoming) {
    return (engine_.rank() - incoming.peer + world_size) % world_size;
  };
  std::stable_sort(incoming_.begin(), incoming_.end(),
                   [&](const Incoming& a, const Incoming& b) { return distance(a) < distance(b); });
  for (Incoming& incoming : incoming_) {
    engine_.wait(incoming.message);
    check(incoming);
    if (!incoming.envelope->is_whole())
      incoming.message =
          engine_.irecv(incoming.peer, MessageTags::kData, incoming.data, incoming.num_bytes);
    else if (incoming.num_bytes > 0)
      std::memcpy(incoming.data, incoming.envelope->data.data(), incoming.num_bytes);
  }
  for (const Incoming& incoming : incoming_)
    if (!incoming.envelope->is_whole()) engine_.wait(incoming.message);
  for (const MessageEngine::Handle send : sends_) engine_.wait(send);
  incoming_.clear();
  sends_.clear();
  num_used_ = 0;
}

void MessageExchange::check(const Incoming& incoming) const {
  const MessageEnvelope& envelope = *incoming.envelope;
  if (!is_compatible(envelope.header, header_)) throw Mismatched{incoming.peer, envelope.header};
  if (envelope.num_bytes != incoming.num_bytes)
    throw Mismatched{.peer = incoming.peer,
                     .theirs = envelope.header,
                     .difference = "rank " + std::to_string(incoming.peer) + " has " +
                                   bytes_text(envelope.num_bytes) + " for rank " +
                                   std::to_string(engine_.rank()) + ", which expects " +
                                   bytes_text(incoming.num_bytes)};
}

void greet_neighbours(MessageEngine& engine, const CallHeader& header,
                      const std::vector<std::uint64_t>& table) {
  const int world_size = engine.world_size();
  const int previous = (engine.rank() + world_size - 1) % world_size;
  const std::size_t num_bytes = table.size() * sizeof(std::uint64_t);
  std::vector<std::uint64_t> theirs(table.size());
  std::byte* sent = engine.stage(num_bytes);
  std::byte* received = engine.stage(num_bytes);
  if (num_bytes > 0) std::memcpy(sent, table.data(), num_bytes);
  MessageExchange exchange(engine, header);
  exchange.recv(previous, received, num_bytes);
  exchange.send((engine.rank() + 1) % world_size, sent, num_bytes);
  exchange.finish();
  if (num_bytes > 0) std::memcpy(theirs.data(), received, num_bytes);
  for (std::size_t entry = 0; entry < table.size(); ++entry)
    if (theirs[entry] != table[entry])
      throw Mismatched{.peer = previous,
                       .theirs = header,
                       .difference = "the share of rank " + std::to_string(entry) + " has " +
                                     bytes_text(theirs[entry]) + " for rank " +
                                     std::to_string(previous) + ", and " +
                                     bytes_text(table[entry]) + " for rank " +
                                     std::to_string(engine.rank())};
}

}  // namespace ringcomm
