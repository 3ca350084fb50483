#pragma once

#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>

#include "core/arch.h"
#include "transport/messages/message_transport.h"
#include "transport/messages/store_membership.h"
#include "transport/process.h"

namespace ringcomm {

/// The watchdog of messages. It ends the waits that nothing else would end: at an operation's
/// deadline, when another rank aborts the group, and when the peer's process has ended without
/// closing the connection (exec() may pass it on). Its thread starts with the first operation and
/// sleeps while there is none.
class MessageWatch {
 public:
  using Clock = std::chrono::steady_clock;

  /// Both must live as long.
  MessageWatch(MessageTransport& transport, StoreMembership& members)
      : transport_(transport), members_(members) {}
  ~MessageWatch();
  MessageWatch(const MessageWatch&) = delete;
  MessageWatch& operator=(const MessageWatch&) = delete;

  /// An operation that waits for messages; the watchdog watches it while this object lives.
  class Operation {
   public:
    Operation(MessageWatch& watch, Clock::time_point deadline);
    ~Operation();
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

    /// It begins to wait for a message from or to `peer`; kAnySource for one from any rank.
    void await(int peer);
    /// No rank is left that could send to its receive from any source.
    void no_source_is_left();
    /// Why its wait for a message of `peer` did not end with kDone.
    Stop stop_of(MessageEnd end, int peer);

   private:
    friend class MessageWatch;
    MessageWatch& watch_;
    Clock::time_point deadline_;
    // Guarded by the watchdog's mutex.
    int peer_ = kNobody;
    bool is_orphan_ = false;
    int num_looks_gone_ = 0;  // of the watchdog, in which the peer was gone
    Clock::time_point is_gone_since_ = Clock::time_point::max();  // as seen by the watchdog
    Stop stop_ = Stop::kNone;                                     // why the watchdog ended it
    std::list<Operation*>::iterator place_;
  };

 private:
  static constexpr int kNobody = -2;

  void run();
  void look();
  bool is_gone(int peer) const;
  bool must_end(Operation& operation, Clock::time_point now) const;

  MessageTransport& transport_;
  StoreMembership& members_;
  std::mutex mutex_;
  std::condition_variable has_news_;
  std::list<Operation*> operations_;
  Clock::time_point wakes_at_ = Clock::time_point::max();
  bool is_stopping_ = false;
  Clock::time_point store_fails_since_ = Clock::time_point::max();  // the thread's, as the next
  bool is_store_gone_ = false;
  BackgroundThread thread_;
};

}  // namespace ringcomm
