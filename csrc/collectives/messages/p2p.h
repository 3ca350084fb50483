#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "collectives/failure.h"
#include "collectives/point_to_point.h"
#include "collectives/stats.h"
#include "transport/background_thread.h"
#include "transport/messages/message_transport.h"
#include "transport/messages/message_members.h"

namespace ringcomm {

/// Users' sends and receives over messages.
///
/// A user's message is an envelope of fixed size with its tag and length, which contains short
/// data. Long data follows in a second message with its own tag. So different sizes are an error
/// instead of corruption, and a receive from any source knows the sender of the second message. A
/// send is complete when its receiver has taken it, so its process may end then.
///
/// A receive from any source fails when all other ranks have left. The transport does not report
/// that, so a thread per peer waits for a message that is never sent.
///
/// A transport's messages can be waited for but not polled. So threads wait: one for each lane,
/// which is the messages of one peer, tag and direction and completes in order. The lanes posted
/// first have threads, and each thread that waits for an operation may add one.
class MessageP2p final : public PointToPoint {
 public:
  /// All must live as long.
  MessageP2p(MessageTransport& transport, MessageMembers& members, Failure& failure, Stats& stats);
  ~MessageP2p() override;
  MessageP2p(const MessageP2p&) = delete;
  MessageP2p& operator=(const MessageP2p&) = delete;

  void post(const P2pOpPtr& op) override;
  bool wait(const P2pOpPtr& op, Clock::time_point deadline,
            const Interrupted& is_interrupted) override;
  void close(const Interrupted& is_interrupted) override;

 private:
  struct Envelope;
  struct Item;
  using LaneKey = std::tuple<P2pOp::Kind, int, std::uint64_t>;  // direction, peer, tag
  struct Lane {
    LaneKey key;
    std::deque<std::unique_ptr<Item>> items;
  };
  using Lock = std::unique_lock<std::mutex>;

  int next_rank() const { return (transport_.rank() + 1) % transport_.world_size(); }
  void check(const P2pOp& op) const;
  std::unique_ptr<Item> prepare(const P2pOpPtr& op);
  void start(Item& item);
  void guard_sources();
  void guard(Message& message);
  void end_orphans();
  void start_thread();
  void need_thread(std::size_t max_threads);
  void hurry(const P2pOp& op);
  void abort_if(Lock& lock, const Interrupted& is_interrupted);
  void run_thread();
  void complete(Item& item);
  void complete_recv(Item& item);
  void wait_for(Item& item, Message& message, int peer);
  void tell(Lock& lock, const P2pOpPtr& op);

  MessageTransport& transport_;
  MessageMembers& members_;
  Failure& failure_;
  Stats& stats_;

  std::mutex mutex_;  // guards all below
  std::map<LaneKey, Lane> lanes_;
  std::deque<Lane*> ready_;  // with something to wait for, and no thread that does
  std::vector<std::uint32_t> num_long_sends_;  // by peer
  std::size_t num_items_ = 0;
  std::size_t num_sends_ = 0;              // of the items
  Clock::time_point flush_deadline_ = {};  // the latest of all sends
  std::size_t num_idle_ = 0;               // threads
  bool is_stopping_ = false;
  std::condition_variable has_work_;
  std::condition_variable has_news_;
  std::vector<BackgroundThread> threads_;
  std::byte guarded_byte_ = {};
  std::vector<MessageTransport::MessagePtr>
      guards_;  // one for each peer that a receive from any source waits for
  std::vector<BackgroundThread> guard_threads_;
  int num_gone_ = 0;  // peers
};

}  // namespace ringcomm
