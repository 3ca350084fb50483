#include "collectives/messages/engine.h"

#include <cstring>
#include <new>

#include "collectives/flight.h"
#include "collectives/trace.h"
#include "core/chunk_layout.h"

namespace ringcomm {
namespace {

// A message takes as long as a long wait, so a rank whose message took ten times that was late.
constexpr std::uint64_t kLateTimes = 10;

}  // namespace

MessageEngine::Handle MessageEngine::irecv(int peer, int tag, void* data, std::size_t num_bytes) {
  return posted_.insert(
      posted_.end(), {transport_.irecv(peer, tag, static_cast<std::byte*>(data), num_bytes), peer});
}

MessageEngine::Handle MessageEngine::isend(int peer, int tag, const void* data,
                                           std::size_t num_bytes) {
  return posted_.insert(
      posted_.end(),
      {transport_.isend(peer, tag, static_cast<const std::byte*>(data), num_bytes), peer});
}

void MessageEngine::wait(Handle message, bool is_arrival) {
  const trace::Span traced([&] {
    return trace::Event{
        .from = message->peer, .kind = trace::Kind::kWait, .name = trace::name_number("wait")};
  });
  operation_->members().note({message->peer});
  operation_->await(message->peer);
  const std::uint64_t begin = flight::ticks();
  const MessageEnd end = message->message->wait();
  if (const std::uint64_t waited = flight::long_wait_since(begin); waited > 0)
    operation_->members().note(
        {message->peer, waited,
         is_arrival && is_arriving_ &&
             waited >= kLateTimes * static_cast<std::uint64_t>(flight::long_wait_ticks)});
  if (end != MessageEnd::kDone)
    throw Stopped{.stop = operation_->stop_of(end, message->peer),
                  .peer = message->peer,
                  .detail = end == MessageEnd::kFailed ? message->message->failure() : ""};
  posted_.erase(message);
}

std::byte* MessageEngine::stage(std::size_t num_bytes) {
  staging_.push_back(std::make_unique_for_overwrite<std::byte[]>(num_bytes));
  return staging_.back().get();
}

void MessageEngine::finish() {
  while (!posted_.empty()) wait(posted_.begin());
  drop();
}

void MessageEngine::drop() {
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

void MessageExchange::finish() {
  for (Incoming& incoming : incoming_) open(incoming);
  if (!incoming_.empty()) engine_.end_arrivals();
  for (const Incoming& incoming : incoming_)
    if (incoming.data_message) engine_.wait(*incoming.data_message);
  for (const MessageEngine::Handle send : sends_) engine_.wait(send);
  incoming_.clear();
  sends_.clear();
  num_used_ = 0;
}

void MessageExchange::open(Incoming& incoming) {
  const auto& [peer, data, num_bytes, envelope, envelope_message, data_message] = incoming;
  engine_.wait(envelope_message, /*is_arrival=*/true);
  if (!is_compatible(envelope->header, header_))
    throw Mismatched{.peer = peer, .theirs = envelope->header};
  if (envelope->num_bytes != num_bytes)
    throw Mismatched{
        .peer = peer,
        .theirs = envelope->header,
        .difference = size_difference(peer, envelope->num_bytes, engine_.rank(), num_bytes)};
  if (envelope->is_whole() && num_bytes > 0)
    std::memcpy(data, envelope->data.data(), num_bytes);
  else if (!envelope->is_whole() && !data_message)
    incoming.data_message = engine_.irecv(peer, MessageTags::of_data(num_bytes), data, num_bytes);
}

void greet_neighbours(MessageEngine& engine, const CallHeader& header,
                      const std::vector<std::uint64_t>& table) {
  const RingSchedule ring(engine.rank(), engine.world_size());
  const std::size_t num_bytes = table.size() * sizeof(std::uint64_t);
  // The engine's: the transport may still use them when an exception has left this function.
  std::byte* sent = engine.stage(num_bytes);
  std::byte* received = engine.stage(num_bytes);
  if (num_bytes > 0) std::memcpy(sent, table.data(), num_bytes);
  MessageExchange exchange(engine, header);
  exchange.recv(ring.previous(), received, num_bytes);
  exchange.send(ring.next(), sent, num_bytes);
  exchange.finish();
  for (std::size_t owner = 0; owner < table.size(); ++owner) {
    std::uint64_t theirs = 0;
    std::memcpy(&theirs, received + owner * sizeof(theirs), sizeof(theirs));
    if (theirs != table[owner])
      throw Mismatched{.peer = ring.previous(),
                       .theirs = header,
                       .difference = table_difference(owner, ring.previous(), theirs, engine.rank(),
                                                      table[owner])};
  }
}

bool is_compatible(const CallHeader& a, const CallHeader& b) {
  const bool has_shares =
      a.op == OpKind::kReduceScatter || a.op == OpKind::kAllGather || has_private_sizes(a.op);
  return has_shares ? is_same_call(a, b) : a == b;
}

std::string size_difference(int from, std::uint64_t has_bytes, int to,
                            std::uint64_t expects_bytes) {
  return "rank " + std::to_string(from) + " has " + std::to_string(has_bytes) + " bytes for rank " +
         std::to_string(to) + ", which expects " + std::to_string(expects_bytes) + " bytes";
}

std::string table_difference(std::size_t owner, int a, std::uint64_t a_bytes, int b,
                             std::uint64_t b_bytes) {
  return "the share of rank " + std::to_string(owner) + " has " + std::to_string(a_bytes) +
         " bytes for rank " + std::to_string(a) + ", and " + std::to_string(b_bytes) +
         " bytes for rank " + std::to_string(b);
}

}  // namespace ringcomm
