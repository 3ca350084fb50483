#include <algorithm>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "host/threads.h"
#include "transport/messages/exchange.h"

namespace ringcomm {
namespace {

// The maximum number of threads for receives without a waiting caller, and of those that sends add;
// further channels start when another one ends.
constexpr std::size_t kMaxThreads = 32;

// A user's message is an envelope with the user's tag. Long data follows with a tag of its own, the
// header of the envelope. So different sizes are an error instead of corruption, and a receive from
// any source knows the sender of the second message.
// Many may be posted at a time, each with its envelope: a page.
using UserEnvelope = Envelope<std::int64_t, 4096 - 2 * sizeof(std::int64_t)>;

struct Item {
  Item(const SendRecvOpPtr& operation, MessageGroup& group)
      : op(operation), watched(group, operation->deadline) {}

  SendRecvOpPtr op;
  UserEnvelope envelope = {};
  MessageGroup::Operation watched;
  Messenger::MessagePtr envelope_message;
  Messenger::MessagePtr data_message;
};

// A messenger's messages can be waited for but not polled. So threads wait: one for each channel,
// the messages of one peer, tag and direction. The channels posted first have threads, and each
// caller that waits may add one.
class MessageSendRecv final : public SendRecv {
 public:
  MessageSendRecv(Messenger& messenger, MessageGroup& group, Failure& failure, Stats& stats)
      : SendRecv(failure, stats, messenger.rank(), messenger.world_size()),
        messenger_(messenger),
        group_(group),
        num_long_sends_(static_cast<std::size_t>(world_size_)) {}
  ~MessageSendRecv() override { close({}); }

  void close(const Interrupted& is_interrupted) override {
    Lock lock(mutex_);
    if (is_stopping_) return;
    for (auto& [key, items] : channels_) {
      if (std::get<0>(key) != OpKind::kSend) break;
      prioritize(*items.front().op);
      for (const Item& item : items) begin_timeout_of(*item.op);
    }
    WaitGuard guard = guard_of(is_interrupted);
    while (!channels_.empty() && std::get<0>(channels_.begin()->first) == OpKind::kSend)
      guard.sleep(lock, has_news_);
    is_stopping_ = true;
    const bool must_abort = !channels_.empty();
    lock.unlock();
    if (must_abort) messenger_.abort();
    lock.lock();
    has_news_.wait(lock, [this] { return channels_.empty(); });
    lock.unlock();
    has_work_.notify_all();
    for (BackgroundThread& thread : threads_) thread.join();
  }

 private:
  // By direction (sends first), peer and tag.
  using Channels = std::map<std::tuple<OpKind, int, std::uint64_t>, std::list<Item>>;

  // As it was posted: the source of any is known once its envelope has come.
  static Channels::key_type key_of(const SendRecvOp& op) {
    return {op.kind, op.is_send() ? op.peer : std::max(op.awaited, -1), op.tag};
  }

  void start(const SendRecvOpPtr& op) override {
    if (!op->is_internal() && op->tag >= static_cast<std::uint64_t>(Messenger::kFirstReservedTag))
      throw std::invalid_argument("tags over the message transport must be 0 to " +
                                  std::to_string(Messenger::kFirstReservedTag - 1) + ", got " +
                                  std::to_string(static_cast<std::int32_t>(op->tag)));
    const Lock lock(mutex_);
    check_open(*op);
    // All steps that may fail come before the message starts, because from then on the messenger
    // uses the caller's memory.
    std::list<Item> items;
    items.emplace_back(op, group_);
    if (threads_.empty()) start_thread();
    const auto channel = channels_.try_emplace({op->kind, op->peer, op->tag}).first;
    try {
      start_message(items.back());
    } catch (...) {  // Unsupported
      if (channel->second.empty()) channels_.erase(channel);
      throw;
    }
    channel->second.splice(channel->second.end(), items);
    if (channel->second.size() == 1) {
      // Receives may have all threads and wait for long; a send ends when it is received.
      ready_.insert(op->is_send() ? ready_.begin() : ready_.end(), channel);
      need_thread(op->is_send() ? 2 * kMaxThreads : kMaxThreads);
    }
  }

  void on_deadline(const SendRecvOp& op) override {
    const auto channel = channels_.find(key_of(op));
    if (channel == channels_.end()) return;
    for (Item& item : channel->second)
      if (item.op.get() == &op) item.watched.set_deadline(op.deadline);
  }

  bool await(const SendRecvOpPtr& op, WaitGuard& guard) override {
    Lock lock(mutex_);
    if (!op->is_done) prioritize(*op);
    begin_timeout_of(*op);
    while (!op->is_done && !guard.is_late()) guard.sleep(lock, has_news_);
    return op->is_done;
  }

  // In the order of the calls, with the lock held: messages of a channel match in that order.
  // Throws Unsupported before anything has started.
  void start_message(Item& item) {
    const SendRecvOp& op = *item.op;
    UserEnvelope& envelope = item.envelope;
    auto* bytes = reinterpret_cast<std::byte*>(&envelope);
    const int tag = MessageTags::of(op);
    if (!op.is_send()) {
      item.envelope_message = messenger_.irecv(op.peer, tag, bytes, sizeof(envelope));
      return;
    }
    envelope.num_bytes = op.num_bytes;
    if (!envelope.is_whole()) {
      std::uint32_t& count = num_long_sends_[static_cast<std::size_t>(op.peer)];
      envelope.header = MessageTags::kFirstLong + static_cast<int>(count++ % MessageTags::kNumLong);
    } else if (op.num_bytes > 0) {
      std::memcpy(envelope.data.data(), op.data, op.num_bytes);
    }
    item.envelope_message = messenger_.isend(op.peer, tag, bytes, envelope.message_bytes());
    if (!envelope.is_whole())
      item.data_message =
          messenger_.isend(op.peer, static_cast<int>(envelope.header), op.data, op.num_bytes);
  }

  void start_thread() {
    threads_.reserve(threads_.size() + 1);  // a thread that has no place could not be joined
    threads_.push_back(start_background_thread("ringcomm-sndrcv", [this] { run_thread(); }));
  }

  void need_thread(std::size_t max_threads) {
    if (num_idle_ >= ready_.size()) {
      has_work_.notify_one();
      return;
    }
    if (threads_.size() >= max_threads) return;
    try {
      start_thread();
    } catch (const std::system_error&) {
      // post() has started one at least: the channel has its turn later.
    }
  }

  // Gives an operation's channel a thread, whatever their number.
  void prioritize(const SendRecvOp& op) {
    const auto place = std::find(ready_.begin(), ready_.end(), channels_.find(key_of(op)));
    if (place == ready_.end()) return;
    const auto channel = *place;
    ready_.erase(place);
    ready_.push_front(channel);
    need_thread(threads_.size() + 1);
  }

  void run_thread() {
    Lock lock(mutex_);
    for (;;) {
      if (ready_.empty()) {
        if (is_stopping_ && channels_.empty()) return;
        ++num_idle_;
        has_work_.wait(lock);
        --num_idle_;
        continue;
      }
      const auto channel = ready_.front();
      ready_.pop_front();
      Item& item = channel->second.front();
      const SendRecvOpPtr op = item.op;
      lock.unlock();
      complete(item);
      lock.lock();
      channel->second.pop_front();  // the messages end before `done` may free their memory
      if (channel->second.empty())
        channels_.erase(channel);
      else
        ready_.push_back(channel);
      op->is_done = true;
      conclude(lock, {&op, 1});
    }
  }

  // Runs without the lock, on one thread per channel. A failure becomes the operation's error.
  void complete(Item& item) {
    try {
      wait_for(item, *item.envelope_message, item.op->peer);
      if (!item.op->is_send()) open(item);
      if (item.data_message != nullptr) wait_for(item, *item.data_message, item.op->peer);
    } catch (const std::exception&) {
      item.op->error = std::current_exception();
      // The group has ended, and with it the other half of a long message.
      messenger_.abort();
    }
  }

  // A receive has its envelope.
  void open(Item& item) {
    SendRecvOp& op = *item.op;
    const UserEnvelope& envelope = item.envelope;
    bool fits = false;
    {
      const Lock lock(mutex_);  // waiting threads read both
      op.peer = item.envelope_message->source();
      fits = op.takes(envelope.num_bytes);
    }
    if (!fits) raise_misfit(op, envelope.num_bytes);
    if (!envelope.is_whole())
      item.data_message =
          messenger_.irecv(op.peer, static_cast<int>(envelope.header), op.data, op.num_bytes);
    else if (op.num_bytes > 0)
      std::memcpy(op.data, envelope.data.data(), op.num_bytes);
  }

  void wait_for(Item& item, Message& message, int peer) {
    item.watched.await(peer);
    const MessageEnd end = message.wait();
    if (end == MessageEnd::kDone) return;
    {
      const Lock lock(mutex_);
      if (is_stopping_) std::rethrow_exception(error_of_close(*item.op));
    }
    // For a receive from any source, all other ranks have ended.
    const bool have_all_ended =
        peer < 0 && item.watched.stop_of(end, peer) == WaitStatus::kPeerDied;
    if (have_all_ended) peer = (rank_ + 1) % world_size_;
    failure_.raise_stopped(item.watched.stop_of(end, peer), peer, activity_of(*item.op),
                           end == MessageEnd::kFailed ? message.failure() : "");
  }

  Messenger& messenger_;
  MessageGroup& group_;

  // The lock guards what follows.
  Channels channels_;
  std::deque<Channels::iterator> ready_;  // with something to wait for, and no thread that does
  std::vector<std::uint32_t> num_long_sends_;  // by peer
  std::size_t num_idle_ = 0;                   // threads
  std::condition_variable has_work_;
  std::vector<BackgroundThread> threads_;
};

}  // namespace

std::unique_ptr<SendRecv> make_message_send_recv(Messenger& messenger, MessageGroup& group,
                                                 Failure& failure, Stats& stats) {
  return std::make_unique<MessageSendRecv>(messenger, group, failure, stats);
}

}  // namespace ringcomm
