#include "bindings/work.h"

#include <ATen/core/ivalue.h>

#include <utility>

#include "bindings/callback_thread.h"
#include "bindings/python_errors.h"
#include "bindings/tensors.h"

namespace ringcomm {
namespace {

std::vector<at::Tensor> take_profiled(std::vector<TensorCall>& calls) {
  std::vector<at::Tensor> inputs;
  for (TensorCall& item : calls) {
    if (inputs.empty())
      inputs = std::move(item.profiled);
    else
      inputs.insert(inputs.end(), item.profiled.begin(), item.profiled.end());
  }
  return inputs;
}

}  // namespace

void throw_wait_timeout(const char* what, std::chrono::milliseconds timeout) {
  throw Error({.kind = ErrorKind::kTimeout, .op = what},
              std::string("ringcomm: ") + what + " did not complete within wait(" +
                  std::to_string(timeout.count()) +
                  " ms); it continues, so you can wait for it again");
}

// ---- LazyFuture

c10::intrusive_ptr<c10::ivalue::Future> LazyFuture::get(const std::vector<at::Tensor>& results) {
  bool is_late = false;
  {
    const std::lock_guard lock(mutex_);
    if (future_ != nullptr) return future_;
    is_late = is_complete_;
    // Started here, so that a thread that cannot be started is the caller's error.
    if (!is_late) CallbackThread::at(callback_level_);
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  }
  // Without the lock: an error takes Python's.
  if (is_late) mark(*future_, results, error_);
  return future_;
}

void LazyFuture::complete(const std::vector<at::Tensor>& results, const std::exception_ptr& error) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(is_complete_, true)) return;
  error_ = error;
  if (future_ == nullptr) return;
  CallbackThread::at(callback_level_).post([future = future_, results, error] {
    mark(*future, results, error);
  });
}

void LazyFuture::mark(c10::ivalue::Future& future, const std::vector<at::Tensor>& results,
                      const std::exception_ptr& error) {
  if (error != nullptr)
    future.setError(to_python(error));
  else
    future.markCompleted(c10::IValue(results));
}

// ---- EngineWork

void EngineWork::wait_for_finish() {
  std::unique_lock lock(mutex_);
  cv_.wait(lock, [this] { return completed_; });
  if (exception_ != nullptr) std::rethrow_exception(exception_);
}

// ---- CollectiveWork

CollectiveWork::CollectiveWork(const std::shared_ptr<Communicator>& communicator,
                               c10d::OpType op_type, const char* title,
                               std::vector<TensorCall> calls, std::vector<at::Tensor> results)
    : EngineWork(communicator, op_type, title, take_profiled(calls)),
      calls_(std::move(calls)),
      results_(std::move(results)),
      seq_(communicator->next_seq()) {
  for (TensorCall& item : calls_) item.link();
}

void CollectiveWork::run(Communicator& communicator, std::chrono::milliseconds timeout) {
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

void CollectiveWork::submit(const c10::intrusive_ptr<CollectiveWork>& self,
                            Communicator& communicator, std::chrono::milliseconds timeout) {
  const WaitLimits limits{.timeout = timeout, .is_interrupted = is_interrupted};
  // Asked beforehand: once the last call is submitted, another thread may end it and clear them.
  const std::size_t num_calls = self->calls_.size();
  with_python_errors([&] {
    for (std::size_t call_idx = 0; call_idx < num_calls; ++call_idx) {
      const auto done = [self, call_idx](const std::exception_ptr& error) {
        self->finish_call(call_idx, error);
      };
      TensorCall& item = self->calls_[call_idx];
      self->last_ticket_ = item.sequence
                               ? communicator.submit(std::move(item.sequence), limits, done)
                               : communicator.submit(item.call, limits, done);
    }
  });
  if (num_calls == 0) self->finish();
}

void CollectiveWork::finish_call(std::size_t call_idx, const std::exception_ptr& error) {
  if (first_error_ == nullptr) first_error_ = error;
  try {
    if (error == nullptr && calls_[call_idx].finish) calls_[call_idx].finish();
  } catch (...) {  // kept for the threads that wait; this thread has no caller
    if (first_error_ == nullptr) first_error_ = std::current_exception();
  }
  if (call_idx + 1 < calls_.size()) return;
  calls_.clear();
  finish(first_error_);
  future_.complete(results_, first_error_);
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  with_python_errors([&] {
    const std::shared_ptr<Communicator> communicator =
        isCompleted() ? nullptr : communicator_.lock();
    if (communicator != nullptr) {
      communicator->failure().check_not_inherited();
      const auto poll = [&] {
        if (is_interrupted()) communicator->abort("interrupted by a signal");
      };
      OrderedQueue& queue = communicator->queue();
      if (timeout == kNoTimeout)
        queue.wait(last_ticket_, poll);
      else if (!queue.wait_until(last_ticket_, deadline_after(timeout), poll))
        throw_wait_timeout("the collective", timeout);
    }
    wait_for_finish();
  });
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  if (last_ticket_ == nullptr) future_.complete(results_, exception());  // ran in the call itself
  return future_.get(results_);
}

// ---- P2pWork

P2pWork::P2pWork(const std::shared_ptr<Communicator>& communicator, c10d::OpType op_type,
                 const char* title, at::Tensor tensor)
    : EngineWork(communicator, op_type, title, {tensor}),
      tensor_(std::move(tensor)),
      contiguous_(plain(tensor_)) {}

void P2pWork::post(const c10::intrusive_ptr<P2pWork>& self, Communicator& communicator, P2pOp op) {
  op.data = static_cast<std::byte*>(self->contiguous_.data_ptr());
  op.num_bytes = self->contiguous_.nbytes();
  op.done = [self] { self->complete(); };
  self->op_ = std::make_shared<P2pOp>(std::move(op));
  try {
    with_python_errors([&] { communicator.p2p()->post(self->op_); });
  } catch (...) {
    self->op_->done = nullptr;  // it holds this work
    self->finish(std::current_exception());
    throw;
  }
}

// Called by the engine and by waiting threads; the later call returns after the first one is
// complete. Throws nothing, because the engine's thread has no caller.
void P2pWork::complete() {
  std::call_once(completed_once_, [this] {
    std::exception_ptr error = op_->error;
    try {
      const bool has_arrived = op_->kind == P2pOp::Kind::kRecv && error == nullptr;
      if (has_arrived && !contiguous_.is_same(tensor_)) copy_back(tensor_, contiguous_);
    } catch (...) {
      error = std::current_exception();
    }
    finish(error);
    future_.complete({tensor_}, error);
  });
}

bool P2pWork::wait(std::chrono::milliseconds timeout) {
  with_python_errors([&] {
    const std::shared_ptr<Communicator> communicator =
        isCompleted() ? nullptr : communicator_.lock();
    if (communicator != nullptr) {
      const auto deadline =
          timeout == kNoTimeout ? PointToPoint::Clock::time_point::max() : deadline_after(timeout);
      if (!communicator->p2p()->wait(op_, deadline, is_interrupted))
        throw_wait_timeout(op_->kind == P2pOp::Kind::kSend ? "the send" : "the receive", timeout);
      complete();
    }
    wait_for_finish();
  });
  return true;
}

int P2pWork::sourceRank() const { return op_->peer; }

c10::intrusive_ptr<c10::ivalue::Future> P2pWork::getFuture() { return future_.get({tensor_}); }

}  // namespace ringcomm
