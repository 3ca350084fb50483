#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace ringcomm {

/// All works that were started between startCoalescing() and endCoalescing(), as one. Each was on
/// its way before: on the CPU there is nothing to gain from holding them back.
class CoalescedWork final : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works);

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
