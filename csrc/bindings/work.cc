#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <iterator>
#include <string_view>
#include <system_error>

#include "bindings/process_group.h"
#include "bindings/python_errors.h"
#include "host/process.h"
#include "host/threads.h"
#include "host/wait.h"

namespace ringcomm {
namespace {

using Future = c10::ivalue::Future;

// Continuations of futures run on threads of their own, never on one that moves data: a
// continuation may issue a collective and wait for its future (PowerSGD's do). So there is a thread
// for each level: futures of works issued by user threads complete on level 0, those of works
// issued in a continuation on level L complete on level L + 1; within a level in the order of
// completion. Levels are shared beyond this depth.
constexpr int kNumLevels = 8;
thread_local int current_level = -1;  // of a thread that runs no continuations

// Runs the continuations of a level one after another. One that has not returned after kPatience
// may wait for a later one: then another thread goes on with those.
class Continuations {
 public:
  using Task = std::function<void()>;
  using Clock = std::chrono::steady_clock;

  // Starts the first thread. Throws std::system_error.
  void prepare() {
    const std::lock_guard lock(mutex_);
    if (num_idle_ + num_running_ > 0) return;
    start();
    ++num_idle_;
  }

  // After prepare(). Throws nothing but std::bad_alloc.
  void submit(Task task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (has_ended_) return;
    changed_.notify_one();
    keep_one_idle();
  }

  // Tasks that have not begun never will, nor are they freed: both may need Python. Waits for those
  // that have, unless one takes longer than `patience`.
  void end(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    has_ended_ = true;
    changed_.wait_for(lock, patience, [this] { return num_running_ == 0; });
  }

 private:
  static constexpr std::chrono::milliseconds kPatience{20};

  void start() {
    start_background_thread("ringcomm-future", [this] { run(); }, kDefaultStackBytes).detach();
  }

  // With the mutex, if there are tasks.
  void keep_one_idle() {
    if (num_idle_ > 0) return;
    try {
      start();
      ++num_idle_;
    } catch (const std::system_error&) {
      // A running one has to return first.
    }
  }

  // One idle thread is kept.
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (tasks_.empty() || has_ended_)
        changed_.wait(lock);
      else if (num_running_ > 0 && Clock::now() < began_ + kPatience)
        changed_.wait_until(lock, began_ + kPatience);
      else
        run_next(lock);
      if (num_idle_ > 1 && tasks_.empty()) break;
    }
    --num_idle_;
  }

  void run_next(std::unique_lock<std::mutex>& lock) {
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    --num_idle_;
    ++num_running_;
    began_ = Clock::now();
    if (!tasks_.empty()) keep_one_idle();
    lock.unlock();
    task();
    task = nullptr;  // without the mutex: it may free what Python holds
    lock.lock();
    --num_running_;
    ++num_idle_;
    changed_.notify_all();  // end() waits, too
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  int num_idle_ = 0;
  int num_running_ = 0;
  bool has_ended_ = false;
  Clock::time_point began_;  // of the last one to start
};

Continuations& continuations(int level) {
  // Threads do not survive a fork: a child starts its own.
  static constinit std::array<PerProcess<Continuations>, kNumLevels> queues;
  return queues[static_cast<std::size_t>(level)].get();
}

c10::intrusive_ptr<Future> make_future(std::vector<c10::Device> devices = {}) {
  return c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()),
                                     std::move(devices));
}

Tensors take_profiled(std::vector<TensorCall>& calls) {
  if (calls.size() == 1) return std::move(calls.front().profiled);
  Tensors inputs;
  for (TensorCall& item : calls) std::ranges::move(item.profiled, std::back_inserter(inputs));
  return inputs;
}

// What the engine does for one call of c10d: a message, or collectives.
class EngineWork final : public c10d::Work {
 public:
  EngineWork(const std::shared_ptr<Communicator>& communicator, c10d::OpType op_type,
             const char* title, std::vector<TensorCall> calls, Tensors results)
      : Work(communicator->rank(), op_type, title, take_profiled(calls)),
        communicator_(communicator),
        calls_(std::move(calls)),
        results_(std::move(results)),
        level_((current_level + 1) % kNumLevels) {
    for (TensorCall& item : calls_) item.link();
  }

  void submit(Communicator& communicator, const WaitLimits& limits) {
    // Asked beforehand: once the last call is submitted, another thread may end it and clear them.
    const std::size_t num_calls = calls_.size();
    with_python_errors([&] {
      for (std::size_t call_idx = 0; call_idx < num_calls; ++call_idx) {
        const auto done = [self = self(), call_idx](const std::exception_ptr& error) {
          self->end_call(call_idx, error);
        };
        TensorCall& item = calls_[call_idx];
        last_request_ = communicator.submit(item.call, limits, done);
        if (call_idx == 0) seq_ = last_request_->number;
      }
    });
    if (num_calls == 0) finish();
  }

  void post(Communicator& communicator, int peer, int tag, std::chrono::milliseconds timeout) {
    const TensorCall& item = calls_.front();
    message_ = std::make_shared<SendRecvOp>();
    message_->kind = item.call.op;
    message_->peer = peer;
    message_->tag = static_cast<std::uint32_t>(tag);
    message_->data = static_cast<std::byte*>(item.message_data());
    message_->num_bytes = item.call.num_elems;
    message_->timeout = timeout;
    // Programs that were written for Gloo receive into a buffer for the longest message.
    static const char* const as_gloo = std::getenv("RINGCOMM_AS_GLOO");
    message_->takes_shorter = as_gloo != nullptr && std::string_view(as_gloo) == "1";
    message_->done = [self = self()] { self->end_call(0, self->message_->error); };
    try {
      with_python_errors([&] { communicator.send_recv()->post(message_); });
    } catch (...) {
      message_->done = nullptr;  // it holds this work
      finish(std::current_exception());
      throw;
    }
  }

  bool wait(std::chrono::milliseconds timeout) override {
    with_python_errors([&] {
      const auto communicator = isCompleted() ? nullptr : communicator_.lock();
      if (communicator != nullptr && !await(*communicator, timeout))
        throw_wait_timeout(message_ == nullptr             ? "the collective"
                           : opType_ == c10d::OpType::SEND ? "the send"
                                                           : "the receive",
                           timeout);
      // Another thread may be about to finish it.
      std::unique_lock lock(mutex_);
      cv_.wait(lock, [this] { return completed_; });
      if (exception_ != nullptr) std::rethrow_exception(exception_);
    });
    unregister(*this);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return results_; }
  int sourceRank() const override {
    return message_ != nullptr ? message_->peer : Work::sourceRank();
  }
  uint64_t getSequencenumber() const override { return seq_; }

  // Created at the first request; most works never need one.
  c10::intrusive_ptr<Future> getFuture() override {
    std::unique_lock lock(mutex_);
    if (future_ != nullptr) return future_;
    const bool is_late = completed_;
    // Started here, so that a thread that cannot be started is the caller's error.
    if (!is_late) continuations(level_).prepare();
    future_ = make_future();
    is_future_marked_ = is_late;
    lock.unlock();  // an error takes Python's
    const auto communicator = is_late ? nullptr : communicator_.lock();
    if (message_ != nullptr && communicator != nullptr)
      communicator->send_recv()->begin_timeout(message_);
    if (is_late) mark_future();
    return future_;
  }

 private:
  c10::intrusive_ptr<EngineWork> self() {
    return c10::intrusive_ptr<EngineWork>::reclaim_copy(this);
  }

  // Waits in the engine, for `timeout` unless it is kNoTimeout; false if that passes before.
  bool await(Communicator& communicator, std::chrono::milliseconds timeout) {
    const auto deadline =
        timeout == kNoTimeout ? SendRecv::Clock::time_point::max() : deadline_after(timeout);
    if (message_ != nullptr)
      return communicator.send_recv()->wait(message_, deadline, is_interrupted);
    communicator.failure().check_not_inherited();
    return communicator.queue().wait(
        last_request_, [&] { communicator.abort_if(is_interrupted); }, deadline);
  }

  // Throws nothing: the thread that calls this moves data for others.
  void end_call(std::size_t call_idx, const std::exception_ptr& error) {
    if (first_error_ == nullptr) first_error_ = error;
    try {
      if (error == nullptr && calls_[call_idx].finish) calls_[call_idx].finish();
    } catch (...) {
      if (first_error_ == nullptr) first_error_ = std::current_exception();
    }
    if (call_idx + 1 < calls_.size()) return;
    calls_.clear();
    finish(first_error_);
    const std::lock_guard lock(mutex_);
    if (future_ == nullptr || std::exchange(is_future_marked_, true)) return;
    continuations(level_).submit([self = self()] {
      current_level = self->level_;
      self->mark_future();
    });
  }

  void mark_future() {
    if (exception_ != nullptr)
      future_->setError(to_python(exception_));
    else
      future_->markCompleted(c10::IValue(results_));
  }

  // Weak, because the communicator's destructor joins its threads, so work on them must not keep it
  // alive. It ends all works first.
  std::weak_ptr<Communicator> communicator_;
  std::uint64_t seq_ = 0;  // of the first call; messages have no common order, so no number
  std::vector<TensorCall> calls_;
  Tensors results_;
  SendRecvOpPtr message_;
  OrderedQueue::Request last_request_;  // of collectives
  std::exception_ptr first_error_;      // of the calls so far; touched in their order only
  const int level_;                     // of its future's continuations
  // Guarded by Work's mutex_.
  c10::intrusive_ptr<Future> future_;
  bool is_future_marked_ = false;  // or about to be
};

// Runs collectives to their end.
void run(Communicator& communicator, const WaitLimits& limits, std::vector<TensorCall>& calls) {
  with_python_errors([&] {
    for (TensorCall& item : calls) {
      item.link();
      communicator.run(std::move(item.call), limits);
      if (item.finish) item.finish();
    }
  });
}

class CoalescedWork final : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<WorkPtr> works)
      : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_)
      if (const std::exception_ptr error = work->exception(); error != nullptr) return error;
    return nullptr;
  }
  // Waits for one after the other, for `timeout` in all; throws the first error.
  bool wait(std::chrono::milliseconds timeout) override {
    const auto deadline = deadline_after(timeout);
    for (const auto& work : works_) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - RunningClock::now());
      // At least 1 ms, because 0 is kNoTimeout.
      work->wait(timeout == kNoTimeout ? kNoTimeout : std::max(left, std::chrono::milliseconds(1)));
    }
    unregister(*this);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override {
    for (const auto& work : works_) work->blockCurrentStream();
  }
  Tensors result() override {
    Tensors results;
    for (const auto& work : works_)
      for (const at::Tensor& tensor : work->result()) results.push_back(tensor);
    return results;
  }
  uint64_t getSequencenumber() const override {
    return works_.empty() ? 0 : works_.front()->getSequencenumber();
  }
  // Its users wait on devices for all parts.
  c10::intrusive_ptr<Future> getFuture() override {
    c10::List<c10::intrusive_ptr<Future>> parts(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    std::vector<c10::Device> devices;
    for (const auto& work : works_) {
      parts.push_back(work->getFuture());
      const auto& more = parts.get(parts.size() - 1)->devices();
      devices.insert(devices.end(), more.begin(), more.end());
    }
    c10::intrusive_ptr<Future> whole = make_future(std::move(devices));
    c10::collectAll(parts)->addCallback([whole, parts, results = result()](Future& all) {
      if (all.hasError()) return whole->setError(all.exception_ptr());
      // The future takes its events from the streams that are current.
      std::vector<c10::Stream> streams;
      for (const c10::Device device : whole->devices())
        streams.push_back(
            c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
      const c10::MultiStreamGuard guard(streams);
      for (const c10::intrusive_ptr<Future> part : parts) part->wait();
      mark_completed(*whole, results);
    });
    return whole;
  }

 private:
  std::vector<WorkPtr> works_;
};

}  // namespace

WorkPtr start_in_engine(const std::shared_ptr<Communicator>& communicator, const CallInfo& info,
                        const WaitLimits& limits, std::vector<TensorCall> calls, Tensors results) {
  const bool is_message = c10d::isP2POp(info.op_type);
  if (!is_message && !info.is_async && !torch_wants_works()) {
    run(*communicator, limits, calls);
    return {};
  }
  auto work = c10::make_intrusive<EngineWork>(communicator, info.op_type, info.title,
                                              std::move(calls), std::move(results));
  if (is_message)
    work->post(*communicator, info.peer, info.tag, limits.timeout);
  else
    work->submit(*communicator, limits);
  if (!is_message && !info.is_async) work->wait(kNoTimeout);
  return work;
}

WorkPtr coalesced_work(int rank, std::vector<WorkPtr> works) {
  return c10::make_intrusive<CoalescedWork>(rank, std::move(works));
}

void end_continuations() {
  constexpr std::chrono::milliseconds kPatience{500};  // a continuation may wait for ever
  for (int level = 0; level < kNumLevels; ++level) continuations(level).end(kPatience);
}

}  // namespace ringcomm
