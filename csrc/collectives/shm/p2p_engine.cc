#include "collectives/shm/p2p_engine.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "collectives/p2p.h"
#include "core/errors.h"

namespace ringcomm {
namespace {

// How long operations may make no progress before the engine's thread drives them. A waiting thread
// drives them earlier and keeps the engine's thread asleep.
constexpr std::chrono::milliseconds kGrace{1};
// How often in a row the thread finds nothing to do before it sleeps for good. Until then no post
// has to wake it: a thread woken for every message takes the core from the rank that waits.
constexpr int kMaxIdleLooks = 100;
constexpr std::chrono::milliseconds kPollInterval{50};
// How late a time-out, a death or an interruption may be noticed.
constexpr std::chrono::milliseconds kLookInterval{50};

}  // namespace

P2pEngine::P2pEngine(shm::Group& group, Failure& failure, Stats& stats)
    : group_(group),
      failure_(failure),
      stats_(stats),
      arch_(slice_, group.rank(), group.world_size()),
      mailboxes_(static_cast<std::size_t>(group.world_size())) {}

void P2pEngine::close(const Interrupted& is_interrupted) {
  Lock lock(mutex_);
  if (std::exchange(is_stopping_, true)) return;  // nothing is received after this
  has_work_.notify_all();
  if (thread_.joinable()) {
    nudge_driver();
    lock.unlock();
    thread_.join();
    lock.lock();
  }
  for (const P2pOpPtr& op : pending_) {
    if (op->kind != P2pOp::Kind::kRecv || op->is_done) continue;
    op->error = orphaned(*op, group_.rank());
    op->is_done = true;
  }
  receives_.clear();
  settle(lock);
  drive_or_sleep(lock, [this] { return pending_.empty(); }, is_interrupted);
}

P2pMailbox& P2pEngine::mailbox(int rank) {
  auto& mailbox = mailboxes_[static_cast<std::size_t>(rank)];
  if (mailbox == nullptr) {
    group_.reserve_p2p(rank);
    mailbox = std::make_unique<P2pMailbox>(arch_, rank, group_.p2p_link(group_.rank(), rank),
                                           group_.p2p_link(rank, group_.rank()),
                                           [this, rank] { ring(rank); });
  }
  return *mailbox;
}

P2pEngine::Lock P2pEngine::enter() {
  num_at_door_.fetch_add(1, std::memory_order_relaxed);
  Lock lock(mutex_);
  num_at_door_.fetch_sub(1, std::memory_order_relaxed);
  return lock;
}

// A driver with continuous progress would hold the lock for a whole large message. It lets other
// threads in for about the time of a wake-up.
void P2pEngine::let_in(Lock& lock) const {
  for (int i = 0; i < 100 && num_at_door_.load(std::memory_order_relaxed) > 0; ++i) {
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
  }
}

void P2pEngine::post(const P2pOpPtr& op) {
  check_peer(*op, group_.rank(), group_.world_size());
  failure_.check_not_inherited();  // before the lock, which may have been held at the fork
  Lock lock = enter();
  failure_.rethrow_if_any();
  if (is_stopping_) std::rethrow_exception(orphaned(*op, group_.rank()));
  op->deadline = deadline_after(op->timeout);
  // An operation that completes immediately needs no check for signals, which may call Python.
  if (pending_.empty()) next_look_ = Clock::now() + kLookInterval;
  pending_.push_back(op);
  progress_or_fail([&] { begin(op); });
  if (!op->is_done) {
    if (!thread_.joinable()) start_thread();
    if (is_thread_asleep_ && !is_driving_) has_work_.notify_one();
  }
  settle(lock);
}

void P2pEngine::begin(const P2pOpPtr& op) {
  if (op->kind == P2pOp::Kind::kSend) {
    mailbox(op->peer).post_send(op);
    return;
  }
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    if (rank == group_.rank() || (op->peer >= 0 && op->peer != rank)) continue;
    if (mailbox(rank).match_kept(op)) return;
  }
  receives_.push_back(op);
}

void P2pEngine::start_thread() {
  try {
    thread_ = start_background_thread("ringcomm-p2p", [this] { run_thread(); });
  } catch (const std::system_error&) {
    // No thread can be started. Waiting threads drive all operations; without a waiting thread they
    // make no progress.
  }
}

// Moves nothing once the group has ended: an operation that failed is done, its buffer perhaps
// freed, and yet half of its message may be in a mailbox.
bool P2pEngine::progress() {
  if (failure_.has_failed()) return false;
  bool has_moved = false;
  for (const auto& mailbox : mailboxes_) {
    if (mailbox == nullptr) continue;
    has_moved |= mailbox->progress_sends();
    if (!is_stopping_) has_moved |= mailbox->progress_receives(receives_);
  }
  return has_moved;
}

// Runs `first`, then makes progress. A failure ends the group, because this may be a thread without
// a caller.
bool P2pEngine::progress_or_fail(const std::function<void()>& first) {
  try {
    if (first) first();
    return progress();
  } catch (const P2pMailbox::SizeMismatch& mismatch) {
    fail_size(mismatch);
  } catch (const std::exception& error) {  // no memory for a message that is to be kept
    failure_.abort(std::string("send or receive: ") + error.what());
  }
  return false;
}

void P2pEngine::ring(int rank) {
  Cursor& doorbell = group_.doorbell(rank);
  // The only cursor with several writers. Only the change matters, so each adds one.
  __atomic_fetch_add(&doorbell.value, 1, __ATOMIC_SEQ_CST);
  wake_sleepers(arch_, doorbell);
}

// Runs with the lock held, except while it sleeps or calls `done` and `is_interrupted`.
void P2pEngine::drive(Lock& lock, const std::function<bool()>& is_enough,
                      const Interrupted& is_interrupted) {
  is_driving_ = true;
  driving_thread_ = std::this_thread::get_id();
  Cursor& doorbell = group_.doorbell(group_.rank());
  SpinBudget no_spin = SpinBudget::none();
  bool has_slept = false;  // a slice of the wait has passed; the wait counts as one miss only
  while (!is_enough()) {
    const std::uint64_t seen = arch_.load_acquire(doorbell.value);
    const bool has_moved = progress_or_fail();
    settle(lock);
    // By the clock and not after an unsuccessful sleep, so that one peer's traffic does not hide
    // another's silence.
    if (Clock::now() >= next_look_) look_around(lock, is_interrupted);
    if (has_moved || is_enough()) {
      has_slept = false;
      let_in(lock);
      continue;
    }
    lock.unlock();
    slice_.begin();
    has_slept = wait_at_least(arch_, has_slept ? no_spin : arch_.budget(), doorbell, seen + 1,
                              group_.rank()) != Stop::kNone;
    lock.lock();
  }
  is_driving_ = false;
  if (num_waiting_ > 0) has_news_.notify_all();
  if (is_thread_asleep_ && !pending_.empty()) has_work_.notify_one();
}

void P2pEngine::abort_if(const Interrupted& is_interrupted) {
  if (is_interrupted && is_interrupted())
    failure_.abort("interrupted by a signal in a send or receive");
}

void P2pEngine::look_around(Lock& lock, const Interrupted& is_interrupted) {
  lock.unlock();
  abort_if(is_interrupted);
  lock.lock();
  next_look_ = Clock::now() + kLookInterval;
  fail_stuck();
  settle(lock);
}

// Ends operations that cannot complete: past their deadline, or with a peer that has left.
void P2pEngine::fail_stuck() {
  const Clock::time_point now = Clock::now();
  struct Stuck {
    P2pOpPtr op;
    Stop stop;
    int peer;
  };
  std::vector<Stuck> stuck;
  for (const P2pOpPtr& op : pending_) {
    const int peer = awaited_peer(*op);
    const Stop state = group_.state_of(peer >= 0 ? peer : group_.rank());
    if (state != Stop::kNone)
      stuck.push_back({op, state, peer});
    else if (now >= op->deadline)
      stuck.push_back({op, Stop::kTimeout, peer});
  }
  if (stuck.empty()) return;
  // A peer that sent and then left has still sent: the links have the last word, and are read after
  // the reason to stop.
  progress_or_fail();
  for (const auto& [op, stop, peer] : stuck)
    if (!op->is_done) fail(op, stop, peer);
}

// The rank that an operation depends on: its peer, or none (-1) for a receive from any source,
// unless all ranks have left.
int P2pEngine::awaited_peer(const P2pOp& op) const {
  int peer = op.peer;
  for (int rank = 0; op.peer < 0 && rank < group_.world_size(); ++rank) {
    if (rank == group_.rank()) continue;
    if (group_.state_of(rank) == Stop::kNone) return -1;
    peer = rank;
  }
  return peer;
}

void P2pEngine::fail(const P2pOpPtr& op, Stop stop, int peer) {
  try {
    failure_.raise_stopped(stop, peer, activity_of(*op));
  } catch (...) {
    op->error = std::current_exception();
  }
  op->is_done = true;
  receives_.remove(op);
}

void P2pEngine::fail_size(const P2pMailbox::SizeMismatch& mismatch) {
  const P2pOpPtr& op = mismatch.receive;
  try {
    raise_misfit(failure_, *op, mismatch.sent_bytes, group_.rank());
  } catch (...) {
    op->error = std::current_exception();
  }
  op->is_done = true;
}

// Removes finished operations from the list and notifies the threads that wait for them.
void P2pEngine::settle(Lock& lock) {
  std::vector<P2pOpPtr> finished;
  for (auto op = pending_.begin(); op != pending_.end();) {
    if ((*op)->is_done) {
      finished.push_back(std::move(*op));
      op = pending_.erase(op);
    } else {
      ++op;
    }
  }
  if (finished.empty()) return;
  for (const P2pOpPtr& op : finished) {
    if (op->error != nullptr) continue;
    const OpKind kind = op->kind == P2pOp::Kind::kSend ? OpKind::kSend : OpKind::kRecv;
    const std::uint64_t sent_bytes = kind == OpKind::kSend ? op->num_bytes : 0;
    stats_.count(kind, Algorithm::kDirect, sent_bytes);
    Stats::process_wide().count(kind, Algorithm::kDirect, sent_bytes);
  }
  if (num_waiting_ > 0) has_news_.notify_all();
  lock.unlock();
  for (const P2pOpPtr& op : finished)
    if (const auto done = std::exchange(op->done, nullptr)) done();
  lock.lock();
}

bool P2pEngine::wait(const P2pOpPtr& op, Clock::time_point deadline,
                     const Interrupted& is_interrupted) {
  failure_.check_not_inherited();
  Lock lock = enter();
  if (!op->is_done && is_driving_ && driving_thread_ == std::this_thread::get_id())
    throw Error({.kind = ErrorKind::kSystem},
                "ringcomm: wait() of a send or receive was called inside another one of its "
                "group, perhaps from a signal handler; this would deadlock");
  drive_or_sleep(lock, [&] { return op->is_done || Clock::now() >= deadline; }, is_interrupted);
  return op->is_done;
}

// Drives until `is_over`, or sleeps while another thread does.
void P2pEngine::drive_or_sleep(Lock& lock, const std::function<bool()>& is_over,
                               const Interrupted& is_interrupted) {
  while (!is_over()) {
    if (!is_driving_) {
      drive(lock, is_over, is_interrupted);
      continue;
    }
    ++num_waiting_;
    nudge_driver();  // the engine's thread hands over
    has_news_.wait_for(lock, kPollInterval);
    --num_waiting_;
    lock.unlock();
    abort_if(is_interrupted);
    lock.lock();
  }
}

void P2pEngine::run_thread() {
  Lock lock(mutex_);
  int num_idle_looks = 0;
  const P2pOp* last_oldest = nullptr;  // to compare with only
  while (!is_stopping_) {
    if (num_idle_looks == kMaxIdleLooks) {
      is_thread_asleep_ = true;
      has_work_.wait(lock);
      is_thread_asleep_ = false;
      num_idle_looks = 0;
      continue;
    }
    has_work_.wait_for(lock, kGrace);
    if (pending_.empty() || is_driving_) {
      ++num_idle_looks;
      continue;
    }
    num_idle_looks = 0;
    // A new operation may be waited for soon. The thread drives only if the oldest one is the same
    // in two checks.
    const P2pOp* oldest = pending_.front().get();
    if (std::exchange(last_oldest, oldest) != oldest) continue;
    drive(lock, [this] { return pending_.empty() || num_waiting_ > 0 || is_stopping_; }, {});
  }
}

}  // namespace ringcomm
