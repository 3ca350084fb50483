#include "collectives/messages/p2p.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "collectives/messages/engine.h"
#include "collectives/p2p_errors.h"
#include "transport/wait_limits.h"

namespace ringcomm {
namespace {

constexpr std::chrono::milliseconds kPollInterval{50};
// The maximum number of threads for lanes without a waiting caller; further lanes start when
// another one ends.
constexpr std::size_t kMaxThreads = 32;

}  // namespace

struct MessageP2p::Envelope {
  std::uint64_t num_bytes = 0;
  std::int32_t data_tag = 0;
  std::array<std::byte, 4096 - 16> data = {};

  bool is_whole() const { return num_bytes <= sizeof(data); }
};

struct MessageP2p::Item {
  Item(const P2pOpPtr& operation, MessageMembers& members)
      : op(operation), watched(members, operation->deadline) {}

  bool is_send() const { return op->kind == P2pOp::Kind::kSend; }

  P2pOpPtr op;
  Envelope envelope;
  MessageMembers::Operation watched;
  MessageTransport::MessagePtr envelope_message;
  MessageTransport::MessagePtr data_message;
};

MessageP2p::MessageP2p(MessageTransport& transport, MessageMembers& members, Failure& failure,
                       Stats& stats)
    : transport_(transport),
      members_(members),
      failure_(failure),
      stats_(stats),
      num_long_sends_(static_cast<std::size_t>(transport.world_size())) {}

MessageP2p::~MessageP2p() { close({}); }

void MessageP2p::close(const Interrupted& is_interrupted) {
  Lock lock(mutex_);
  if (is_stopping_) return;
  std::optional<MessageMembers::Operation> flush;
  try {
    if (num_sends_ > 0) {
      flush.emplace(members_, flush_deadline_);
      flush->await(MessageTransport::kAnySource);
    }
  } catch (const std::system_error&) {  // no thread to watch the deadline
    transport_.abort();
  }
  while (num_sends_ > 0) {
    has_news_.wait_for(lock, kPollInterval);
    abort_if(lock, is_interrupted);
  }
  is_stopping_ = true;
  const bool must_abort = num_items_ > 0 || !guards_.empty();
  lock.unlock();
  if (must_abort) transport_.abort();
  lock.lock();
  has_news_.wait(lock, [this] { return num_items_ == 0; });
  lock.unlock();
  has_work_.notify_all();
  for (BackgroundThread& thread : threads_) thread.join();
  for (BackgroundThread& thread : guard_threads_) thread.join();
}

void MessageP2p::check(const P2pOp& op) const {
  check_peer(op, transport_.rank(), transport_.world_size());
  if (!MessageTags::is_internal(op.tag) &&
      op.tag >= static_cast<std::uint64_t>(MessageTransport::kFirstReservedTag))
    throw std::invalid_argument("tags over the p2p transport must be 0 to " +
                                std::to_string(MessageTransport::kFirstReservedTag - 1) + ", got " +
                                std::to_string(static_cast<std::int32_t>(op.tag)));
}

void MessageP2p::post(const P2pOpPtr& op) {
  check(*op);
  failure_.check_not_inherited();  // before the lock, which may have been held at the fork
  Lock lock(mutex_);
  failure_.rethrow_if_any();
  if (is_stopping_) std::rethrow_exception(orphaned(*op, transport_.rank()));
  op->deadline = deadline_after(op->timeout);
  // All steps that may fail come before the message starts, because from then on the transport uses
  // the caller's memory.
  auto item = prepare(op);
  if (threads_.empty()) start_thread();
  if (op->peer < 0) guard_sources();
  const LaneKey key{op->kind, op->peer, op->tag};
  const auto place = lanes_.try_emplace(key, Lane{.key = key, .items = {}}).first;
  Lane& lane = place->second;
  lane.items.push_back(std::move(item));
  try {
    start(*lane.items.back());
  } catch (...) {  // Unsupported
    lane.items.pop_back();
    if (lane.items.empty()) lanes_.erase(place);
    throw;
  }
  ++num_items_;
  if (op->kind == P2pOp::Kind::kSend) {
    ++num_sends_;
    flush_deadline_ = std::max(flush_deadline_, op->deadline);
  }
  if (lane.items.size() == 1) {
    ready_.push_back(&lane);
    need_thread(kMaxThreads);
  }
  end_orphans();
}

// Allocates the resources of the operation; throws if that fails.
std::unique_ptr<MessageP2p::Item> MessageP2p::prepare(const P2pOpPtr& op) {
  auto item = std::make_unique<Item>(op, members_);
  item->envelope.num_bytes = item->is_send() ? op->num_bytes : 0;
  return item;
}

// In the order of the calls, with the lock held: messages of a lane match in that order.
void MessageP2p::start(Item& item) {
  const P2pOp& op = *item.op;
  Envelope& envelope = item.envelope;
  auto* bytes = reinterpret_cast<std::byte*>(&envelope);
  const int tag = MessageTags::of(op.tag);
  if (!item.is_send()) {
    item.envelope_message = transport_.irecv(op.peer, tag, bytes, sizeof(envelope));
    return;
  }
  if (!envelope.is_whole()) {
    std::uint32_t& count = num_long_sends_[static_cast<std::size_t>(op.peer)];
    envelope.data_tag = MessageTags::kFirstLong + static_cast<int>(count++ % MessageTags::kNumLong);
  } else if (op.num_bytes > 0) {
    std::memcpy(envelope.data.data(), op.data, op.num_bytes);
  }
  item.envelope_message = transport_.isend(op.peer, tag, bytes, sizeof(envelope));
  if (!envelope.is_whole())
    item.data_message = transport_.isend(op.peer, envelope.data_tag, op.data, op.num_bytes);
}

void MessageP2p::start_thread() {
  threads_.reserve(threads_.size() + 1);  // a thread that has no place could not be joined
  threads_.push_back(start_background_thread("ringcomm-p2p", [this] { run_thread(); }));
}

void MessageP2p::need_thread(std::size_t max_threads) {
  if (num_idle_ >= ready_.size()) {
    has_work_.notify_one();
    return;
  }
  if (threads_.size() >= max_threads) return;
  try {
    start_thread();
  } catch (const std::system_error&) {
    // post() has started one at least: the lane has its turn later.
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
    tell(lock, op);
    if (op->kind == P2pOp::Kind::kSend) --num_sends_;
    --num_items_;
    has_news_.notify_all();
  }
}

// Runs without the lock, on one thread per lane. A failure becomes the operation's error.
void MessageP2p::complete(Item& item) {
  try {
    wait_for(item, *item.envelope_message, item.op->peer);
    if (!item.is_send()) complete_recv(item);
    if (item.data_message != nullptr) wait_for(item, *item.data_message, item.op->peer);
  } catch (const std::exception&) {
    item.op->error = std::current_exception();
    // The group has ended, and with it the other half of a long message.
    transport_.abort();
  }
}

void MessageP2p::complete_recv(Item& item) {
  P2pOp& op = *item.op;
  const Envelope& envelope = item.envelope;
  {
    const Lock lock(mutex_);  // waiting threads read it
    op.peer = item.envelope_message->source();
  }
  if (envelope.num_bytes != op.num_bytes)
    raise_misfit(failure_, op, envelope.num_bytes, transport_.rank());
  if (!envelope.is_whole())
    item.data_message = transport_.irecv(op.peer, envelope.data_tag, op.data, op.num_bytes);
  else if (op.num_bytes > 0)
    std::memcpy(op.data, envelope.data.data(), op.num_bytes);
}

void MessageP2p::wait_for(Item& item, Message& message, int peer) {
  item.watched.await(peer);
  const MessageEnd end = message.wait();
  if (end == MessageEnd::kDone) return;
  {
    const Lock lock(mutex_);
    if (is_stopping_) std::rethrow_exception(orphaned(*item.op, transport_.rank()));
  }
  // For a receive from any source, all other ranks have ended.
  const bool is_orphan = peer < 0 && item.watched.stop_of(end, peer) == Stop::kPeerDied;
  if (is_orphan) peer = next_rank();
  const Stop stop = item.watched.stop_of(end, peer);
  failure_.raise_stopped(stop, peer, activity_of(*item.op),
                         end == MessageEnd::kFailed ? message.failure() : "");
}

// The operation is done. Without the lock while its callback runs.
void MessageP2p::tell(Lock& lock, const P2pOpPtr& op) {
  const bool is_send = op->kind == P2pOp::Kind::kSend;
  op->is_done = true;
  if (op->error == nullptr)
    for (Stats* stats : {&stats_, &Stats::process_wide()})
      stats->count(is_send ? OpKind::kSend : OpKind::kRecv, Algorithm::kDirect,
                   is_send ? op->num_bytes : 0);
  const auto done = std::exchange(op->done, nullptr);
  has_news_.notify_all();
  lock.unlock();
  if (done) done();
  lock.lock();
}

// One message and one thread for each peer. If a thread cannot be started, the next call continues
// there.
void MessageP2p::guard_sources() {
  const auto num_peers = static_cast<std::size_t>(transport_.world_size() - 1);
  guard_threads_.reserve(num_peers);
  while (guard_threads_.size() < num_peers) {
    const int peer =
        (transport_.rank() + 1 + static_cast<int>(guard_threads_.size())) % transport_.world_size();
    if (guards_.size() == guard_threads_.size())
      guards_.push_back(transport_.irecv(peer, MessageTags::kGuard, &guarded_byte_, 1));
    guard_threads_.push_back(start_background_thread(
        "ringcomm-guard", [this, message = guards_.back().get()] { guard(*message); }));
  }
}

void MessageP2p::guard(Message& message) {
  const MessageEnd end = message.wait();
  const Lock lock(mutex_);
  if (end != MessageEnd::kFailed) return;
  ++num_gone_;
  end_orphans();
}

// Ends receives from any source if no rank is left to send. The watch does, a moment later, because
// what has been sent may be on its way through this process.
void MessageP2p::end_orphans() {
  if (num_gone_ < transport_.world_size() - 1) return;
  for (const auto& [key, lane] : lanes_)
    if (std::get<1>(key) < 0)
      for (const auto& item : lane.items) item->watched.no_source_is_left();
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
    abort_if(lock, is_interrupted);
  }
  return op->is_done;
}

void MessageP2p::abort_if(Lock& lock, const Interrupted& is_interrupted) {
  lock.unlock();
  if (is_interrupted && is_interrupted())
    failure_.abort("interrupted by a signal in a send or receive");
  lock.lock();
}

}  // namespace ringcomm
