#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>

#include "collectives/call.h"
#include "collectives/failure.h"
#include "collectives/trace.h"
#include "host/wait.h"

namespace ringcomm {

/// A message on its way, as its sender or its receiver sees it.
struct SendRecvOp {
  /// The tags of the library's own messages begin here; users' have 32 bits.
  static constexpr std::uint64_t kFirstInternalTag = std::uint64_t{1} << 32;

  OpKind kind = OpKind::kSend;  ///< or kRecv
  int peer = -1;  ///< the other rank; of a receive from any source -1 until it is matched
  std::uint64_t tag = 0;
  std::byte* data = nullptr;  ///< only read by a send
  std::size_t num_bytes = 0;
  std::chrono::milliseconds timeout{0};
  bool takes_shorter = false;  ///< a receive: a shorter message fills its beginning, as Gloo's
  /// Called once, on any thread and without locks, when `is_done` has become true.
  std::function<void()> done = {};

  RunningClock::time_point deadline = RunningClock::time_point::max();  ///< until it is awaited
  std::size_t moved_bytes = 0;
  bool is_done = false;
  std::exception_ptr error = {};
  std::uint64_t begin_ticks = 0;
  recorder::Call recorded = {};
  recorder::Call traced = {};
  int awaited = recorder::kAnyRank;  ///< `peer` as it was given; that of any source is set later

  bool is_send() const { return kind == OpKind::kSend; }
  bool is_internal() const { return tag >= kFirstInternalTag; }
  /// A receive has met a message of so many bytes: whether it takes it, and then has its size.
  bool takes(std::uint64_t sent_bytes) {
    if (takes_shorter && sent_bytes < num_bytes) num_bytes = sent_bytes;
    return sent_bytes == num_bytes;
  }
};
using SendRecvOpPtr = std::shared_ptr<SendRecvOp>;

/// Point-to-point messages of one rank. Neither a send nor a receive blocks where it is issued.
/// All functions may be called from any thread.
class SendRecv {
 public:
  using Clock = RunningClock;
  using Interrupted = std::function<bool()>;

  virtual ~SendRecv() = default;

  /// Starts an operation; its buffer must live until it is done. Throws what ended the group, and
  /// std::invalid_argument where `peer` is no other rank.
  void post(const SendRecvOpPtr& op);
  /// Its timeout begins, if it has not: somebody waits for it. One that nobody awaits may be for
  /// later, such as a receive of the end of the job.
  void begin_timeout(const SendRecvOpPtr& op);
  /// Returns true when the operation has ended (with or without an error), false if `deadline`
  /// passes before. `is_interrupted` is called about every 50 ms, true ends the group; may be
  /// empty.
  bool wait(const SendRecvOpPtr& op, Clock::time_point deadline, const Interrupted& is_interrupted);
  /// Call it before the destructor, after the last post. Returns when every send is received, its
  /// receiver has left, or its timeout has passed; ends the receives with an error.
  /// `is_interrupted` as in wait(). A second call does nothing.
  virtual void close(const Interrupted& is_interrupted) = 0;
  /// Whether this is the thread of a wait or a close(), in which `is_interrupted` runs.
  bool is_inside() const { return polled_ == this; }
  /// As Transport's. Waits for nothing.
  virtual void return_idle_pages() {}

  /// Records the messages from now on; `log` may be null and lives as long.
  void record_as(std::uint32_t group, recorder::Log* log) {
    group_ = group;
    log_ = log;
  }

 protected:
  using Lock = std::unique_lock<std::mutex>;

  SendRecv(Failure& failure, Stats& stats, int rank, int world_size)
      : failure_(failure), stats_(stats), rank_(rank), world_size_(world_size) {}

  /// Takes the lock.
  virtual Lock enter() { return Lock(mutex_); }
  /// With the lock.
  void begin_timeout_of(SendRecvOp& op);

  /// post() and wait() of an operation with a valid peer, in the process that made the group.
  /// await() begins its timeout.
  virtual void start(const SendRecvOpPtr& op) = 0;
  virtual bool await(const SendRecvOpPtr& op, WaitGuard& guard) = 0;
  /// Its deadline is set. With the lock.
  virtual void on_deadline(const SendRecvOp&) {}

  /// Of a wait whose interruption ends the group; uses `is_interrupted`.
  WaitGuard guard_of(const Interrupted& is_interrupted,
                     Clock::time_point deadline = Clock::time_point::max());

  /// Throws what ended the group, or that it is being destroyed. With the lock.
  void check_open(const SendRecvOp& op) const;
  /// Counts operations that have ended, wakes who waits, and calls each `done` without the lock.
  void conclude(Lock& lock, std::span<const SendRecvOpPtr> ops);
  /// A message of `sent_bytes` matched a receive of another size: ends the group.
  [[noreturn]] void raise_misfit(const SendRecvOp& receive, std::uint64_t sent_bytes);
  /// The error of an operation whose group is destroyed.
  std::exception_ptr error_of_close(const SendRecvOp& op) const;

  Failure& failure_;
  Stats& stats_;
  int rank_;
  int world_size_;
  std::mutex mutex_;                  // guards the rest, and what the transports add
  std::condition_variable has_news_;  // an operation has ended
  bool is_stopping_ = false;

 private:
  recorder::Event event_of(const SendRecvOp& op) const;
  recorder::Call record(const SendRecvOp& op) const;
  void record_end(const SendRecvOp& op) const;

  std::uint32_t group_ = 0;
  recorder::Log* log_ = nullptr;
  static inline thread_local const SendRecv* polled_ = nullptr;
};

/// "recv from rank 2 (tag 6, 44 bytes)"
Activity activity_of(const SendRecvOp& op);

}  // namespace ringcomm
