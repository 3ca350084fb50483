#include "collectives/send_recv.h"

#include <atomic>
#include <list>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <vector>

#include "host/host_arch.h"
#include "host/shared_memory.h"
#include "host/threads.h"
#include "transport/shm/context.h"
#include "transport/shm/mailbox.h"

namespace ringcomm {
namespace {

// How long operations may make no progress before the queue's thread drives them.
constexpr std::chrono::milliseconds kGrace{1};
// How often in a row the thread finds nothing to do before it sleeps for good. Until then no post
// has to wake it: a thread woken for every message takes the core from the rank that waits.
constexpr int kMaxIdleLooks = 100;

// Ends each sleep at the doorbell after one slice: the driver itself looks at deadlines and at all
// peers.
class OneSlice final : public WaitGuard {
 public:
  void begin() { is_over_ = false; }
  WaitStatus check(int) override {
    return std::exchange(is_over_, true) ? WaitStatus::kTimeout : WaitStatus::kNone;
  }

 private:
  bool is_over_ = false;
};

/// Over links in shared memory. A thread that waits drives all operations of the rank; if none does
/// for a millisecond, the queue's own thread. Peers ring this rank's doorbell (a cursor in shared
/// memory) whenever they fill or drain a slot, so one wait covers all links.
class SendRecvQueue final : public SendRecv {
 public:
  SendRecvQueue(host::Group& group, Failure& failure, Stats& stats)
      : SendRecv(failure, stats, group.rank(), group.world_size()),
        group_(group),
        arch_(slice_, group.rank()),
        mailboxes_(static_cast<std::size_t>(group.world_size())) {}
  ~SendRecvQueue() override { close({}); }

  void close(const Interrupted& is_interrupted) override {
    Lock lock(mutex_);
    if (std::exchange(is_stopping_, true)) return;  // nothing is received after this
    has_work_.notify_all();
    if (thread_.joinable()) {
      ring(rank_);  // a driving thread notices
      lock.unlock();
      thread_.join();
      lock.lock();
    }
    for (const SendRecvOpPtr& op : pending_)
      if (!op->is_send() && !op->is_done) end(*op, error_of_close(*op));
    receives_.clear();
    settle(lock);
    for (const SendRecvOpPtr& op : pending_) begin_timeout_of(*op);
    WaitGuard guard = guard_of(is_interrupted);
    drive_or_sleep(lock, [this] { return pending_.empty(); }, guard);
  }

  // The slots of a drained link are the sender's.
  void return_idle_pages() override {
    const Lock lock(mutex_, std::try_to_lock);
    if (!lock || !pending_.empty() || num_returned_ == num_moves_ || host::may_refuse_pages() ||
        std::exchange(num_moves_seen_, num_moves_) != num_moves_)
      return;
    bool is_drained = true;
    for (int rank = 0; rank < world_size_; ++rank) {
      if (mailboxes_[static_cast<std::size_t>(rank)] == nullptr) continue;
      const LinkGeometry link = group_.send_recv_link(rank_, rank);
      if (arch_.load_acquire(link.head->value) == arch_.load_acquire(link.tail->value))
        host::return_pages(link.slots, link.num_slots * link.slot_bytes);
      else
        is_drained = false;
    }
    if (is_drained) num_returned_ = num_moves_;
  }

 private:
  void start(const SendRecvOpPtr& op) override {
    Lock lock = enter();
    check_open(*op);
    // An operation that completes immediately needs no check for signals, which may call Python.
    if (pending_.empty()) next_check_ = Clock::now() + kCheckInterval;
    pending_.push_back(op);
    // A mailbox has room for messages that nobody will read.
    if (op->is_send() && group_.state_of(op->peer) != WaitStatus::kNone) fail_stuck();
    if (!op->is_done) progress([&] { begin(op); });
    if (!op->is_done) {
      try {
        if (!thread_.joinable())
          thread_ = start_background_thread("ringcomm-sndrcv", [this] { run_thread(); });
      } catch (const std::system_error&) {
        // No thread can be started. Waiting threads drive all operations; without a waiting thread
        // they make no progress.
      }
      if (is_thread_asleep_ && !is_driving_) has_work_.notify_one();
    }
    settle(lock);
  }

  bool await(const SendRecvOpPtr& op, WaitGuard& guard) override {
    Lock lock = enter();
    if (!op->is_done && is_driving_ && driving_thread_ == std::this_thread::get_id())
      throw Error({.kind = ErrorKind::kSystem},
                  "ringcomm: wait() of a send or receive was called where another one ends; this "
                  "would deadlock");
    begin_timeout_of(*op);
    drive_or_sleep(lock, [&] { return op->is_done || guard.is_late(); }, guard);
    return op->is_done;
  }

  static void end(SendRecvOp& op, std::exception_ptr error) {
    op.error = std::move(error);
    op.is_done = true;
  }

  SendRecvMailbox& mailbox(int rank) {
    auto& mailbox = mailboxes_[static_cast<std::size_t>(rank)];
    if (mailbox == nullptr) {
      group_.reserve_send_recv(rank);
      mailbox = std::make_unique<SendRecvMailbox>(arch_, rank, group_.send_recv_link(rank_, rank),
                                                  group_.send_recv_link(rank, rank_),
                                                  [this, rank] { ring(rank); });
    }
    return *mailbox;
  }

  Lock enter() override {
    num_contenders_.fetch_add(1, std::memory_order_relaxed);
    Lock lock(mutex_);
    num_contenders_.fetch_sub(1, std::memory_order_relaxed);
    return lock;
  }

  // A driver with continuous progress would hold the lock for a whole large message. It lets other
  // threads in for about the time of a wake-up.
  void yield_to_contenders(Lock& lock) const {
    for (int i = 0; i < 100 && num_contenders_.load(std::memory_order_relaxed) > 0; ++i) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
  }

  void begin(const SendRecvOpPtr& op) {
    if (op->is_send()) return mailbox(op->peer).post_send(op);
    for (int i = 0; i < world_size_; ++i) {
      const int rank = (first_ + i) % world_size_;
      if (rank == rank_ || (op->peer >= 0 && op->peer != rank)) continue;
      // Of any source: not the beginning of a message whose rest cannot come.
      const bool takes_parts = op->peer >= 0 || group_.state_of(rank) == WaitStatus::kNone;
      if (mailbox(rank).match_kept(op, takes_parts)) return;
    }
    receives_.push_back(op);
  }

  // Runs `first`, then moves what can be moved; true if anything was. A failure ends the group,
  // because this may be a thread without a caller.
  bool progress(const std::function<void()>& first = {}) {
    bool has_moved = false;
    try {
      if (first) first();
      // Moves nothing once the group has ended: an operation that failed is done, its buffer
      // perhaps freed, and yet half of its message may be in a mailbox.
      if (failure_.has_failed()) return false;
      first_ = (first_ + 1) % world_size_;
      for (int i = 0; i < world_size_; ++i) {
        const auto& mailbox = mailboxes_[static_cast<std::size_t>((first_ + i) % world_size_)];
        if (mailbox == nullptr) continue;
        has_moved |= mailbox->progress_sends();
        if (!is_stopping_) has_moved |= mailbox->progress_receives(receives_);
      }
      num_moves_ += has_moved ? 1 : 0;
      return has_moved;
    } catch (const SizeMismatch& mismatch) {
      SendRecvOp& receive = *mismatch.receive;
      end(receive, error_of([&] { raise_misfit(receive, mismatch.sent_bytes); }));
    } catch (const std::exception& error) {  // no memory for a message that is to be kept
      failure_.abort(std::string("send or receive: ") + error.what());
    }
    return false;
  }

  void ring(int rank) {
    Cursor& doorbell = group_.doorbell(rank);
    // The only cursor with several writers. Only the change matters, so each adds one.
    __atomic_fetch_add(&doorbell.value, 1, __ATOMIC_SEQ_CST);
    wake_sleepers(arch_, doorbell);
  }

  // Runs with the lock held, except while it sleeps, checks the guard or calls `done`. Returns
  // when it is enough, or another thread drives.
  void drive(Lock& lock, const std::function<bool()>& is_enough, WaitGuard& guard) {
    is_driving_ = true;
    driving_thread_ = std::this_thread::get_id();
    Cursor& doorbell = group_.doorbell(rank_);
    SpinBudget no_spin = SpinBudget::none();
    bool has_slept = false;  // a slice of the wait has passed; the wait counts as one miss only
    while (!is_enough()) {
      const std::uint64_t seen = arch_.load_acquire(doorbell.value);
      const bool has_moved = progress();
      settle(lock);
      // By the clock and not after an unsuccessful sleep, so that one peer's traffic does not hide
      // another's silence.
      if (Clock::now() >= next_check_) {
        next_check_ = Clock::now() + kCheckInterval;
        fail_stuck();
        settle(lock);
        // It may wait for Python's lock, or run a handler of a signal: others drive meanwhile.
        stop_driving();
        lock.unlock();
        std::ignore = guard.check();
        lock.lock();
        if (is_driving_) return;
        is_driving_ = true;
        driving_thread_ = std::this_thread::get_id();
        fail_stuck();  // if it has ended the group
        settle(lock);
      }
      if (has_moved || is_enough()) {
        has_slept = false;
        yield_to_contenders(lock);
        continue;
      }
      lock.unlock();
      slice_.begin();
      has_slept = wait_at_least(arch_, has_slept ? no_spin : arch_.budget(), doorbell, seen + 1,
                                rank_) != WaitStatus::kNone;
      lock.lock();
    }
    stop_driving();
  }

  void stop_driving() {
    is_driving_ = false;
    if (num_waiting_ > 0) has_news_.notify_all();
    if (is_thread_asleep_ && !pending_.empty()) has_work_.notify_one();
  }

  // Drives until `is_over`, or sleeps while another thread does.
  void drive_or_sleep(Lock& lock, const std::function<bool()>& is_over, WaitGuard& guard) {
    while (!is_over()) {
      if (!is_driving_) {
        drive(lock, is_over, guard);
        continue;
      }
      ++num_waiting_;
      ring(rank_);  // the queue's thread hands over
      guard.sleep(lock, has_news_);
      --num_waiting_;
    }
  }

  // Ends operations that cannot complete: past their deadline, or with a peer that has left.
  void fail_stuck() {
    const Clock::time_point now = Clock::now();
    struct Stuck {
      SendRecvOpPtr op;
      WaitStatus stop;
      int peer;
    };
    std::vector<Stuck> stuck;
    for (const SendRecvOpPtr& op : pending_) {
      const int peer = awaited_peer(*op);
      const WaitStatus state = group_.state_of(peer >= 0 ? peer : rank_);
      if (state != WaitStatus::kNone || now >= op->deadline)
        stuck.push_back({op, state != WaitStatus::kNone ? state : WaitStatus::kTimeout, peer});
    }
    if (stuck.empty()) return;
    // A peer that sent and then left has still sent: the links have the last word, and are read
    // after the reason to stop.
    progress();
    for (const auto& [op, stop, peer] : stuck) {
      if (op->is_done) continue;
      end(*op, error_of([&] { failure_.raise_stopped(stop, peer, activity_of(*op)); }));
      receives_.remove(op);
    }
  }

  // The rank that an operation depends on: its peer, or none (-1) for a receive from any source,
  // unless all ranks have left.
  int awaited_peer(const SendRecvOp& op) const {
    int peer = op.peer;
    for (int rank = 0; op.peer < 0 && rank < world_size_; ++rank) {
      if (rank == rank_) continue;
      if (group_.state_of(rank) == WaitStatus::kNone) return -1;
      peer = rank;
    }
    return peer;
  }

  // Removes finished operations from the list and tells who waits for them.
  void settle(Lock& lock) {
    std::vector<SendRecvOpPtr> finished;
    std::erase_if(pending_, [&](const SendRecvOpPtr& op) {
      if (op->is_done) finished.push_back(op);
      return op->is_done;
    });
    if (!finished.empty()) conclude(lock, finished);
  }

  void run_thread() {
    Lock lock(mutex_);
    int num_idle_looks = 0;
    const SendRecvOp* last_oldest = nullptr;  // to compare with only
    while (!is_stopping_) {
      if (num_idle_looks == kMaxIdleLooks) {
        is_thread_asleep_ = true;
        has_work_.wait(lock);
        is_thread_asleep_ = false;
        num_idle_looks = kMaxIdleLooks - 2;  // soon again, if another thread drives
        continue;
      }
      has_work_.wait_for(lock, kGrace);
      if (pending_.empty() || is_driving_) {
        ++num_idle_looks;
        continue;
      }
      num_idle_looks = 0;
      // A new operation may be waited for soon. The thread drives only if the oldest one is the
      // same in two checks.
      const SendRecvOp* oldest = pending_.front().get();
      if (std::exchange(last_oldest, oldest) != oldest) continue;
      WaitGuard never;
      drive(lock, [this] { return pending_.empty() || num_waiting_ > 0 || is_stopping_; }, never);
    }
  }

  host::Group& group_;
  OneSlice slice_;
  host::HostArch arch_;

  std::atomic<int> num_contenders_ = 0;  // threads that request the lock while another one drives
  // The lock guards what follows, and the links.
  // By rank, null until needed: links cost memory once looked at.
  std::vector<std::unique_ptr<SendRecvMailbox>> mailboxes_;
  std::list<SendRecvOpPtr> receives_;  // that no message has matched, in the order of posting
  std::list<SendRecvOpPtr> pending_;
  std::condition_variable
      has_work_;  // the thread sleeps here, waiters that do not drive at has_news_
  // Times that progress() moved something: now, and when return_idle_pages() looked and acted.
  std::uint64_t num_moves_ = 0, num_moves_seen_ = 0, num_returned_ = 0;
  bool is_driving_ = false;
  std::thread::id driving_thread_;
  int first_ = 0;  // of the ranks whose messages are looked at, in turn
  Clock::time_point next_check_ = {};
  int num_waiting_ = 0;
  bool is_thread_asleep_ = false;
  BackgroundThread thread_;
};

}  // namespace

std::unique_ptr<SendRecv> ShmTransport::make_send_recv(Failure& failure, Stats& stats) {
  return std::make_unique<SendRecvQueue>(group_, failure, stats);
}

}  // namespace ringcomm
