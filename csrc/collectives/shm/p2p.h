#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/failure.h"
#include "collectives/collective.h"
#include "collectives/p2p.h"
#include "transport/process.h"
#include "transport/shm/group.h"
#include "transport/shm/host_arch.h"

namespace ringcomm {

class P2pMailbox;

/// Point-to-point messages over links in shared memory.
///
/// A thread that waits drives all operations of the rank. If no thread does for a millisecond, the
/// engine's own thread takes over. Peers ring this rank's doorbell (a cursor in shared memory)
/// whenever they fill or drain a slot, so one wait covers all links.
class P2pEngine final : public PointToPoint {
 public:
  P2pEngine(shm::Group& group, Failure& failure, Stats& stats);
  ~P2pEngine() override;
  P2pEngine(const P2pEngine&) = delete;
  P2pEngine& operator=(const P2pEngine&) = delete;

  void post(const P2pOpPtr& op) override;
  bool wait(const P2pOpPtr& op, Clock::time_point deadline,
            const Interrupted& is_interrupted) override;
  void close(const Interrupted& is_interrupted) override;

 private:
  // Ends each sleep at the doorbell after one slice: the driver itself looks at deadlines and at
  // all peers.
  class OneSlice final : public shm::StopSource {
   public:
    void begin() { is_over_ = false; }
    Stop stopped(int) override {
      return std::exchange(is_over_, true) ? Stop::kTimeout : Stop::kNone;
    }

   private:
    bool is_over_ = false;
  };

  using Lock = std::unique_lock<std::mutex>;

  Lock enter();
  void let_in(Lock& lock) const;
  void begin(const P2pOpPtr& op);
  bool progress(const std::function<void()>& first = {});
  P2pMailbox& mailbox(int rank);
  void drive(Lock& lock, const std::function<bool()>& is_enough, const Interrupted& is_interrupted);
  void drive_or_sleep(Lock& lock, const std::function<bool()>& is_over,
                      const Interrupted& is_interrupted);
  void abort_if(Lock& lock, const Interrupted& is_interrupted);
  void fail_stuck();
  int awaited_peer(const P2pOp& op) const;
  void settle(Lock& lock);
  void ring(int rank);
  void run_thread();

  shm::Group& group_;
  Failure& failure_;
  Stats& stats_;
  OneSlice slice_;
  shm::HostArch arch_;

  std::atomic<int> num_at_door_ = 0;  // threads that request the lock while another one drives
  std::mutex mutex_;                  // guards all below, and the links
  // By rank, null until needed: links cost memory once looked at.
  std::vector<std::unique_ptr<P2pMailbox>> mailboxes_;
  std::list<P2pOpPtr> receives_;  // that no message has matched, in the order of posting
  std::list<P2pOpPtr> pending_;
  std::condition_variable has_news_;  // waiters that do not drive sleep here
  std::condition_variable has_work_;  // the thread does here
  bool is_driving_ = false;
  std::thread::id driving_thread_;
  Clock::time_point next_look_ = {};
  int num_waiting_ = 0;
  bool is_thread_asleep_ = false;
  bool is_stopping_ = false;
  BackgroundThread thread_;
};

}  // namespace ringcomm
