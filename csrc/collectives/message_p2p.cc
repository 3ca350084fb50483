#include "collectives/message_p2p.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "collectives/message_exchange.h"
#include "transport/background_thread.h"

namespace ringcomm {
namespace {

constexpr std::chrono::milliseconds kPollInterval{50};
// Threads for lanes that nobody waits for; a lane beyond them has its turn when another is over.
constexpr std::size_t kMaxThreads = 32;
// Long messages of a pair under way at once, before a tag is used again: then in order.
constexpr std::uint32_t kNumDataTags = 1U << 20;
constexpr int kFirstDataTag = MessageTransport::kMaxTag - static_cast<int>(kNumDataTags);

Activity activity_of(const P2pOp& op) {
  const bool is_send = op.kind == P2pOp::Kind::kSend;
  const std::string peer = op.peer >= 0 ? "rank " + std::to_string(op.peer) : "any rank";
  return {.op = is_send ? "send" : "recv",
          .seq = -1,
          .description = (is_send ? "send to " : "recv from ") + peer + " (tag " +
                         std::to_string(op.tag) + ", " + std::to_string(op.num_bytes) + " bytes)",
          .timeout = op.timeout};
}

}  // namespace

struct MessageP2p::Envelope {
  std::uint64_t num_bytes = 0;
  std::int32_t data_tag = 0;
  std::array<std::byte, 4096 - 16> data = {};

  bool is_whole() const { return num_bytes <= sizeof(data); }
};

struct MessageP2p::Item {
  Item(const P2pOpPtr& operation, MessageWatch& watch)
      : op(operation), watched(watch, operation->deadline) {}

  P2pOpPtr op;
  Envelope envelope;
  MessageWatch::Operation watched;
  MessageTransport::MessagePtr envelope_message;
  MessageTransport::MessagePtr data_message;
};

MessageP2p::MessageP2p(MessageTransport& transport, MessageWatch& watch, Failure& failure,
                       Stats& stats)
    : transport_(transport),
      watch_(watch),
      failure_(failure),
      stats_(stats),
      num_long_sends_(static_cast<std::size_t>(transport.world_size())) {}

MessageP2p::~MessageP2p() {
  {
    Lock lock(mutex_);
    has_news_.wait(lock, [this] { return num_sends_ == 0; });
    is_stopping_ = true;
    const bool has_receives = num_items_ > 0;
    lock.unlock();
    if (has_receives) transport_.abort();
    lock.lock();
    has_news_.wait(lock, [this] { return num_items_ == 0; });
  }
  has_work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void MessageP2p::check(const P2pOp& op) const {
  const int least = op.kind == P2pOp::Kind::kRecv ? -1 : 0;  // -1: from any source
  if (op.peer < least || op.peer >= transport_.world_size() || op.peer == transport_.rank())
    throw std::invalid_argument("the peer of a send or receive is another rank of the group's " +
                                std::to_string(transport_.world_size()) + ", got " +
                                std::to_string(op.peer));
  if (op.tag >= static_cast<std::uint64_t>(MessageTransport::kFirstReservedTag))
    throw std::invalid_argument("tags over the p2p transport are 0 to " +
                                std::to_string(MessageTransport::kFirstReservedTag - 1) + ", got " +
                                std::to_string(static_cast<std::int32_t>(op.tag)));
}

void MessageP2p::post(const P2pOpPtr& op) {
  check(*op);
  Lock lock(mutex_);
  failure_.rethrow_if_any();
  op->deadline = deadline_after(op->timeout);
  auto item = start(op);
  const LaneKey key{op->kind, op->peer, op->tag};
  Lane& lane = lanes_.try_emplace(key, Lane{.key = key, .items = {}}).first->second;
  lane.items.push_back(std::move(item));
  ++num_items_;
  if (op->kind == P2pOp::Kind::kSend) ++num_sends_;
  if (lane.items.size() > 1) return;
  ready_.push_back(&lane);
  need_thread(kMaxThreads);
}

// In the order of the calls, with the lock held: messages of a lane match in that order.
std::unique_ptr<MessageP2p::Item> MessageP2p::start(const P2pOpPtr& op) {
  auto item = std::make_unique<Item>(op, watch_);
  Envelope& envelope = item->envelope;
  auto* bytes = reinterpret_cast<std::byte*>(&envelope);
  const auto tag = static_cast<int>(op->tag);
  if (op->kind == P2pOp::Kind::kRecv) {
    item->envelope_message = transport_.irecv(op->peer, tag, bytes, sizeof(envelope));
    return item;
  }
  envelope.num_bytes = op->num_bytes;
  if (!envelope.is_whole()) {
    std::uint32_t& count = num_long_sends_[static_cast<std::size_t>(op->peer)];
    envelope.data_tag = kFirstDataTag + static_cast<int>(count++ % kNumDataTags);
  } else if (op->num_bytes > 0) {
    std::memcpy(envelope.data.data(), op->data, op->num_bytes);
  }
  item->envelope_message = transport_.isend(op->peer, tag, bytes, sizeof(envelope));
  if (!envelope.is_whole())
    item->data_message = transport_.isend(op->peer, envelope.data_tag, op->data, op->num_bytes);
  return item;
}

void MessageP2p::need_thread(std::size_t max_threads) {
  if (num_idle_ >= ready_.size()) {
    has_work_.notify_one();
    return;
  }
  if (threads_.size() >= max_threads) return;
  try {
    threads_.push_back(start_background_thread("ringcomm-p2p", [this] { run_thread(); }));
  } catch (const std::system_error&) {
    if (threads_.empty()) throw;  // otherwise the lane has its turn later
  }
}

void MessageP2p::run_thread() {
  Lock lock(mutex_);
  for (;;) {
    if (ready_.empty()) {
      if (is_stopping_ && num_items_ == 0) return;
      ++num_idle_;
      has_work_.wait(lock);
      --num_idle_;
      continue;
    }
    Lane& lane = *ready_.front();
    ready_.pop_front();
    Item& item = *lane.items.front();
    lock.unlock();
    complete(item);
    const P2pOpPtr op = item.op;
    lock.lock();
    lane.items.pop_front();
    if (lane.items.empty())
      lanes_.erase(lane.key);
    else
      ready_.push_back(&lane);
    settle(lock, op);
  }
}

// Runs without the lock, on one thread per lane; what goes wrong is the operation's error.
void MessageP2p::complete(Item& item) {
  try {
    wait_for(item, *item.envelope_message, item.op->peer);
    if (item.op->kind == P2pOp::Kind::kRecv) complete_recv(item);
    if (item.data_message != nullptr) wait_for(item, *item.data_message, item.op->peer);
  } catch (const std::exception&) {
    item.op->error = std::current_exception();
  }
  // A long message's other half: the group has ended, and with it all messages.
  if (item.op->error != nullptr) transport_.abort();
}

void MessageP2p::complete_recv(Item& item) {
  P2pOp& op = *item.op;
  const Envelope& envelope = item.envelope;
  {
    const Lock lock(mutex_);  // whoever waits looks at it
    op.peer = item.envelope_message->source();
  }
  if (envelope.num_bytes != op.num_bytes)
    failure_.raise_mismatch(
        op.peer,
        "rank " + std::to_string(op.peer) + " sent " + std::to_string(envelope.num_bytes) +
            " bytes with this tag, where rank " + std::to_string(transport_.rank()) + " receives " +
            std::to_string(op.num_bytes),
        activity_of(op));
  if (!envelope.is_whole())
    item.data_message = transport_.irecv(op.peer, envelope.data_tag, op.data, op.num_bytes);
  else if (op.num_bytes > 0)
    std::memcpy(op.data, envelope.data.data(), op.num_bytes);
}

void MessageP2p::wait_for(Item& item, Message& message, int peer) {
  const MessageEnd end = message.wait();
  if (end == MessageEnd::kDone) return;
  {
    const Lock lock(mutex_);
    if (is_stopping_)
      throw Error({.kind = ErrorKind::kAborted, .rank = transport_.rank(), .op = "recv"},
                  "ringcomm: " + activity_of(*item.op).description +
                      ": the group was destroyed before a message came");
  }
  failure_.raise_stopped(item.watched.stop_of(end, peer), peer, activity_of(*item.op),
                         end == MessageEnd::kFailed ? message.failure() : "");
}

void MessageP2p::settle(Lock& lock, const P2pOpPtr& op) {
  const bool is_send = op->kind == P2pOp::Kind::kSend;
  op->is_done = true;
  if (op->error == nullptr) {
    const OpKind kind = is_send ? OpKind::kSend : OpKind::kRecv;
    for (Stats* stats : {&stats_, &Stats::process_wide()})
      stats->count(kind, Algorithm::kDirect, is_send ? op->num_bytes : 0);
  }
  const auto done = std::exchange(op->done, nullptr);
  has_news_.notify_all();
  lock.unlock();
  if (done) done();
  lock.lock();
  --num_items_;
  if (is_send) --num_sends_;
  has_news_.notify_all();
}

// Gives an operation's lane a thread, whatever their number.
void MessageP2p::hurry(const P2pOp& op) {
  const auto found = lanes_.find({op.kind, op.peer, op.tag});
  if (found == lanes_.end()) return;
  const auto place = std::find(ready_.begin(), ready_.end(), &found->second);
  if (place == ready_.end()) return;
  ready_.erase(place);
  ready_.push_front(&found->second);
  need_thread(threads_.size() + 1);
}

bool MessageP2p::wait(const P2pOpPtr& op, Clock::time_point deadline,
                      const Interrupted& is_interrupted) {
  failure_.check_not_inherited();
  Lock lock(mutex_);
  if (!op->is_done) hurry(*op);
  while (!op->is_done && Clock::now() < deadline) {
    has_news_.wait_until(lock, std::min(deadline, Clock::now() + kPollInterval));
    if (op->is_done) break;
    lock.unlock();
    if (is_interrupted && is_interrupted())
      failure_.abort("interrupted by a signal in a send or receive");
    lock.lock();
  }
  return op->is_done;
}

}  // namespace ringcomm
