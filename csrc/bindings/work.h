#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "bindings/tensors.h"

namespace ringcomm {

/// Throws the error of a wait with a timeout; `what` continues.
[[noreturn]] void throw_wait_timeout(const char* what, std::chrono::milliseconds timeout);

/// What the engine does for one call of c10d: a message, or collectives, usually one; the coalesced
/// forms have several.
class EngineWork final : public c10d::Work {
 public:
  EngineWork(const std::shared_ptr<Communicator>& communicator, c10d::OpType op_type,
             const char* title, std::vector<TensorCall> calls, Tensors results);

  /// Runs the collectives to their end, in this thread if nothing is before them. Throws; the work
  /// is finished afterwards.
  void run(Communicator& communicator, std::chrono::milliseconds timeout);
  /// Starts the collectives.
  void submit(Communicator& communicator, std::chrono::milliseconds timeout);
  /// Starts the message.
  void post(Communicator& communicator, P2pOp op);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return results_; }
  int sourceRank() const override {
    return message_ != nullptr ? message_->peer : Work::sourceRank();
  }
  /// Created at the first request; most works never need one. Continuations run on threads of their
  /// own, so they may issue collectives and wait for them.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return seq_; }

 private:
  c10::intrusive_ptr<EngineWork> self() {
    return c10::intrusive_ptr<EngineWork>::reclaim_copy(this);
  }
  bool await(Communicator& communicator, std::chrono::milliseconds timeout);
  void end_call(std::size_t call_idx, const std::exception_ptr& error);
  void mark_future();

  // Weak, because the communicator's destructor joins its threads, so work on them must not keep it
  // alive. It ends all works first.
  std::weak_ptr<Communicator> communicator_;
  const std::uint64_t seq_;  // messages have no common order, so no number
  std::vector<TensorCall> calls_;
  Tensors results_;
  P2pOpPtr message_;
  OrderedQueue::Ticket last_ticket_;  // of collectives
  std::exception_ptr first_error_;    // of the calls so far; touched in their order only
  const int callback_level_;
  // Guarded by Work's mutex_.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool is_future_marked_ = false;  // or about to be
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
  Tensors result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace ringcomm
