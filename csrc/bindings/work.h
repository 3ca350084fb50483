#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "bindings/callback_thread.h"
#include "bindings/tensor_call.h"
#include "collectives/communicator.h"

namespace ringcomm {

/// Throws the error of a wait with a timeout; `what` continues.
[[noreturn]] void throw_wait_timeout(const char* what, std::chrono::milliseconds timeout);

/// The future of a work, created at the first request; most works never need one. Thread-safe.
class LazyFuture {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> get(const std::vector<at::Tensor>& results);
  /// The work is done; continuations run on a callback thread.
  void complete(const std::vector<at::Tensor>& results, const std::exception_ptr& error);

 private:
  static void mark(c10::ivalue::Future& future, const std::vector<at::Tensor>& results,
                   const std::exception_ptr& error);

  const int callback_level_ = CallbackThread::level_of_new_work();
  std::mutex mutex_;
  bool is_complete_ = false;
  std::exception_ptr error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// The base of collectives and messages.
class EngineWork : public c10d::Work {
 public:
  void synchronize() override { wait(kNoTimeout); }

 protected:
  EngineWork(const std::shared_ptr<Communicator>& communicator, c10d::OpType op_type,
             const char* title, const std::vector<at::Tensor>& inputs)
      : Work(communicator->rank(), op_type, title, inputs), communicator_(communicator) {}

  /// Returns when finish() has been called, by whatever thread; throws what it was called with.
  void wait_for_finish();

  // Weak, because the communicator's destructor joins its threads, so work on them must not keep it
  // alive. It ends all works first.
  std::weak_ptr<Communicator> communicator_;
};

/// Collectives that one call of c10d makes: usually one, several for the coalesced forms.
class CollectiveWork final : public EngineWork {
 public:
  CollectiveWork(const std::shared_ptr<Communicator>& communicator, c10d::OpType op_type,
                 const char* title, std::vector<TensorCall> calls, std::vector<at::Tensor> results);

  /// Runs the calls to their end, in this thread if nothing is before them. Throws; the work is
  /// finished afterwards.
  void run(Communicator& communicator, std::chrono::milliseconds timeout);
  /// Starts the calls. `self` is this work.
  static void submit(const c10::intrusive_ptr<CollectiveWork>& self, Communicator& communicator,
                     std::chrono::milliseconds timeout);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return seq_; }

 private:
  void finish_call(std::size_t call_idx, const std::exception_ptr& error);

  std::vector<TensorCall> calls_;
  std::vector<at::Tensor> results_;
  uint64_t seq_;
  OrderedQueue::Ticket last_ticket_;
  std::exception_ptr first_error_;  // of the calls so far; touched in their order only
  LazyFuture future_;
};

/// A send or a receive.
class P2pWork final : public EngineWork {
 public:
  P2pWork(const std::shared_ptr<Communicator>& communicator, c10d::OpType op_type,
          const char* title, at::Tensor tensor);

  /// Starts the operation. `self` is this work.
  static void post(const c10::intrusive_ptr<P2pWork>& self, Communicator& communicator, P2pOp op);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return {tensor_}; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return 0; }  // messages have no common order

 private:
  void complete();

  at::Tensor tensor_;      // the user's
  at::Tensor contiguous_;  // what is sent, or received into
  P2pOpPtr op_;
  std::once_flag completed_once_;
  LazyFuture future_;
};

}  // namespace ringcomm
