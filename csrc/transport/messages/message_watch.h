#pragma once

#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>

#include "core/stop.h"
#include "transport/background_thread.h"
#include "transport/messages/message_transport.h"
#include "transport/messages/store_membership.h"

namespace ringcomm {

/// Ends the waits for messages that nothing else would end: at an operation's deadline, and when
/// another rank gives the group up. Its thread starts with the first operation and sleeps while
/// there is none.
class MessageWatch {
 public:
  using Clock = std::chrono::steady_clock;

  /// Both must live as long.
  MessageWatch(MessageTransport& transport, StoreMembership& members)
      : transport_(transport), members_(members) {}
  ~MessageWatch();
  MessageWatch(const MessageWatch&) = delete;
  MessageWatch& operator=(const MessageWatch&) = delete;

  /// Something that waits for messages, under watch while this lives.
  class Operation {
   public:
    Operation(MessageWatch& watch, Clock::time_point deadline);
    ~Operation();
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

    /// Why its wait for a message of `peer` did not end with kDone.
    Stop stop_of(MessageEnd end, int peer);

   private:
    friend class MessageWatch;
    MessageWatch& watch_;
    Clock::time_point deadline_;
    bool is_late_ = false;  // guarded by the watch's mutex
    std::list<Operation*>::iterator place_;
  };

 private:
  void run();
  void look();

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
