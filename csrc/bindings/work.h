#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "bindings/tensor_call.h"
#include "collectives/communicator.h"

namespace ringcomm {

/// Throws the error of a wait with a timeout; `what` continues.
[[noreturn]] void throw_wait_timeout(const char* what, std::chrono::milliseconds timeout);

/// What the engine does for one call of c10d.
class EngineWork : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return results_; }
  /// Created at the first request; most works never need one. Continuations run on threads of their
  /// own, so they may issue collectives and wait for them.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return seq_; }

 protected:
  EngineWork(const std::shared_ptr<Communicator>& communicator, c10d::OpType op_type,
             const char* title, const std::vector<at::Tensor>& inputs,
             std::vector<at::Tensor> results, std::uint64_t seq);

  /// Waits in the engine, for `timeout` unless it is kNoTimeout; false if that passes before.
  virtual bool await(Communicator& communicator, std::chrono::milliseconds timeout) = 0;
  /// Finishes the work and its future.
  void end(const std::exception_ptr& error);

  std::vector<at::Tensor> results_;

 private:
  void mark_future();

  // Weak, because the communicator's destructor joins its threads, so work on them must not keep it
  // alive. It ends all works first.
  std::weak_ptr<Communicator> communicator_;
  const std::uint64_t seq_;
  const int callback_level_;
  // Guarded by Work's mutex_.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool is_future_marked_ = false;  // or about to be
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

 private:
  bool await(Communicator& communicator, std::chrono::milliseconds timeout) override;
  void end_call(std::size_t call_idx, const std::exception_ptr& error);

  std::vector<TensorCall> calls_;
  OrderedQueue::Ticket last_ticket_;
  std::exception_ptr first_error_;  // of the calls so far; touched in their order only
};

/// A send or a receive.
class P2pWork final : public EngineWork {
 public:
  P2pWork(const std::shared_ptr<Communicator>& communicator, c10d::OpType op_type,
          const char* title, TensorCall item, const std::vector<at::Tensor>& results);

  /// Starts the operation, which lacks its buffer. `self` is this work.
  static void post(const c10::intrusive_ptr<P2pWork>& self, Communicator& communicator, P2pOp op);

  int sourceRank() const override { return op_->peer; }

 private:
  bool await(Communicator& communicator, std::chrono::milliseconds timeout) override;
  void end_once();

  TensorCall item_;
  P2pOpPtr op_;
  std::once_flag ended_once_;
};

/// All works that were started between startCoalescing() and endCoalescing(), as one. Each was on
/// its way before: on the CPU there is nothing to gain from holding them back.
class CoalescedWork final : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  /// Waits for all, for `timeout` in all; throws the first error among them.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace ringcomm
