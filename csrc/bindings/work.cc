#include "bindings/work.h"

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <iterator>

#include "bindings/python_errors.h"
#include "transport/process.h"
#include "transport/process.h"

namespace ringcomm {
namespace {

using Future = c10::ivalue::Future;

// Runs the continuations of futures, one after another, never on a thread that moves data, so that
// a continuation may issue a collective and wait for it.
//
// A continuation may also wait for the future of that collective (PowerSGD's do), which a
// continuation's own thread would have to complete. So there is a thread for each level: futures
// of works issued by user threads complete on level 0, those of works issued in a continuation on
// level L complete on level L + 1. Within a level they run in the order of completion.
class CallbackThread {
 public:
  // Continuations may wait in each other this deep; beyond, levels are shared.
  static constexpr int kNumLevels = 8;

  // The level for works issued by this thread.
  static int level_of_new_work() { return (current_level + 1) % kNumLevels; }
  // Starts the thread at the first call; it never ends. Throws std::system_error.
  static CallbackThread& at(int level);

  void post(std::function<void()> callback) {
    {
      const std::lock_guard lock(mutex_);
      callbacks_.push_back(std::move(callback));
    }
    has_work_.notify_one();
  }

 private:
  void run();

  static thread_local int current_level;

  std::once_flag started_once_;
  std::mutex mutex_;
  std::condition_variable has_work_;
  std::deque<std::function<void()>> callbacks_;
};

thread_local int CallbackThread::current_level = -1;  // of a thread that runs no continuations

CallbackThread& CallbackThread::at(int level) {
  // Threads do not survive a fork: a child starts its own.
  static constinit std::array<PerProcess<CallbackThread>, kNumLevels> threads;
  CallbackThread& thread = threads[static_cast<std::size_t>(level)].get();
  std::call_once(thread.started_once_, [&thread, level] {
    const auto body = [&thread, level] {
      current_level = level;
      thread.run();
    };
    start_background_thread("ringcomm-future", body, kDefaultStackBytes).detach();
  });
  return thread;
}

void CallbackThread::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    has_work_.wait(lock, [this] { return !callbacks_.empty(); });
    std::function<void()> callback = std::move(callbacks_.front());
    callbacks_.pop_front();
    lock.unlock();
    callback();
    callback = nullptr;  // destroys what it holds without the lock
    lock.lock();
  }
}

c10::intrusive_ptr<Future> make_future() {
  return c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
}

Tensors take_profiled(std::vector<TensorCall>& calls) {
  if (calls.size() == 1) return std::move(calls.front().profiled);
  Tensors inputs;
  for (TensorCall& item : calls) std::ranges::move(item.profiled, std::back_inserter(inputs));
  return inputs;
}

}  // namespace

void throw_wait_timeout(const char* what, std::chrono::milliseconds timeout) {
  throw Error({.kind = ErrorKind::kTimeout, .op = what},
              std::string("ringcomm: ") + what + " did not complete within wait(" +
                  std::to_string(timeout.count()) +
                  " ms); it continues, so you can wait for it again");
}

// ---- EngineWork

EngineWork::EngineWork(const std::shared_ptr<Communicator>& communicator, c10d::OpType op_type,
                       const char* title, std::vector<TensorCall> calls, Tensors results)
    : Work(communicator->rank(), op_type, title, take_profiled(calls)),
      communicator_(communicator),
      seq_(c10d::isP2POp(op_type) ? 0 : communicator->next_seq()),
      calls_(std::move(calls)),
      results_(std::move(results)),
      callback_level_(CallbackThread::level_of_new_work()) {
  for (TensorCall& item : calls_) item.link();
}

void EngineWork::run(Communicator& communicator, std::chrono::milliseconds timeout) {
  const WaitLimits limits{.timeout = timeout, .is_interrupted = is_interrupted};
  try {
    with_python_errors([&] {
      for (TensorCall& item : calls_) {
        if (item.sequence)
          communicator.run(item.sequence, limits);
        else
          communicator.run(item.call, limits);
        if (item.finish) item.finish();
      }
    });
  } catch (...) {
    finish(std::current_exception());
    throw;
  }
  calls_.clear();
  finish();
}

void EngineWork::submit(Communicator& communicator, std::chrono::milliseconds timeout) {
  const WaitLimits limits{.timeout = timeout, .is_interrupted = is_interrupted};
  // Asked beforehand: once the last call is submitted, another thread may end it and clear them.
  const std::size_t num_calls = calls_.size();
  with_python_errors([&] {
    for (std::size_t call_idx = 0; call_idx < num_calls; ++call_idx) {
      const auto done = [self = self(), call_idx](const std::exception_ptr& error) {
        self->end_call(call_idx, error);
      };
      TensorCall& item = calls_[call_idx];
      last_ticket_ = item.sequence ? communicator.submit(std::move(item.sequence), limits, done)
                                   : communicator.submit(item.call, limits, done);
    }
  });
  if (num_calls == 0) finish();
}

void EngineWork::post(Communicator& communicator, P2pOp op) {
  message_ = std::make_shared<P2pOp>(std::move(op));
  message_->done = [self = self()] { self->end_call(0, self->message_->error); };
  try {
    with_python_errors([&] { communicator.p2p()->post(message_); });
  } catch (...) {
    message_->done = nullptr;  // it holds this work
    finish(std::current_exception());
    throw;
  }
}

// Throws nothing: the thread that calls this moves data for others.
void EngineWork::end_call(std::size_t call_idx, const std::exception_ptr& error) {
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
  CallbackThread::at(callback_level_).post([self = self()] { self->mark_future(); });
}

bool EngineWork::wait(std::chrono::milliseconds timeout) {
  with_python_errors([&] {
    const std::shared_ptr<Communicator> communicator =
        isCompleted() ? nullptr : communicator_.lock();
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
  return true;
}

// Waits in the engine, for `timeout` unless it is kNoTimeout; false if that passes before.
bool EngineWork::await(Communicator& communicator, std::chrono::milliseconds timeout) {
  const auto deadline =
      timeout == kNoTimeout ? PointToPoint::Clock::time_point::max() : deadline_after(timeout);
  if (message_ != nullptr) return communicator.p2p()->wait(message_, deadline, is_interrupted);
  communicator.failure().check_not_inherited();
  const auto poll = [&] {
    if (is_interrupted()) communicator.abort("interrupted by a signal");
  };
  if (timeout != kNoTimeout) return communicator.queue().wait_until(last_ticket_, deadline, poll);
  communicator.queue().wait(last_ticket_, poll);
  return true;
}

c10::intrusive_ptr<Future> EngineWork::getFuture() {
  std::unique_lock lock(mutex_);
  if (future_ != nullptr) return future_;
  const bool is_late = completed_;
  // Started here, so that a thread that cannot be started is the caller's error.
  if (!is_late) CallbackThread::at(callback_level_);
  future_ = make_future();
  is_future_marked_ = is_late;
  lock.unlock();  // an error takes Python's
  if (is_late) mark_future();
  return future_;
}

void EngineWork::mark_future() {
  if (exception_ != nullptr)
    future_->setError(to_python(exception_));
  else
    future_->markCompleted(c10::IValue(results_));
}

// ---- CoalescedWork

bool CoalescedWork::isCompleted() {
  return std::ranges::all_of(works_, [](const auto& work) { return work->isCompleted(); });
}

bool CoalescedWork::isSuccess() const {
  return std::ranges::all_of(works_, [](const auto& work) { return work->isSuccess(); });
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& work : works_)
    if (const std::exception_ptr error = work->exception(); error != nullptr) return error;
  return nullptr;
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  for (const auto& work : works_) {
    const auto spent = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
    // At least 1 ms, because 0 is kNoTimeout.
    work->wait(timeout == kNoTimeout ? kNoTimeout
                                     : std::max(timeout - spent, std::chrono::milliseconds(1)));
  }
  return true;
}

Tensors CoalescedWork::result() {
  Tensors results;
  for (const auto& work : works_)
    for (const at::Tensor& tensor : work->result()) results.push_back(tensor);
  return results;
}

c10::intrusive_ptr<Future> CoalescedWork::getFuture() {
  c10::intrusive_ptr<Future> whole = make_future();
  c10::List<c10::intrusive_ptr<Future>> parts(c10::FutureType::create(whole->elementType()));
  for (const auto& work : works_) parts.push_back(work->getFuture());
  c10::collectAll(parts)->addCallback([whole, results = result()](Future& all) {
    if (all.hasError())
      whole->setError(all.exception_ptr());
    else
      whole->markCompleted(c10::IValue(results));
  });
  return whole;
}

uint64_t CoalescedWork::getSequencenumber() const {
  return works_.empty() ? 0 : works_.front()->getSequencenumber();
}

}  // namespace ringcomm
