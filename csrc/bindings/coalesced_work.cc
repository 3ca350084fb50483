#include "bindings/coalesced_work.h"

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <utility>

namespace ringcomm {

CoalescedWork::CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
    : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

bool CoalescedWork::isCompleted() {
  return std::all_of(works_.begin(), works_.end(),
                     [](const auto& work) { return work->isCompleted(); });
}

bool CoalescedWork::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(),
                     [](const auto& work) { return work->isSuccess(); });
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
    if (timeout == kNoTimeout) {
      work->wait();
      continue;
    }
    const auto spent = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
    // 0 would mean no limit.
    work->wait(std::max(timeout - spent, std::chrono::milliseconds(1)));
  }
  return true;
}

std::vector<at::Tensor> CoalescedWork::result() {
  std::vector<at::Tensor> results;
  for (const auto& work : works_)
    for (const at::Tensor& tensor : work->result()) results.push_back(tensor);
  return results;
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFuture() {
  const auto tensors = c10::ListType::create(c10::TensorType::get());
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> parts(c10::FutureType::create(tensors));
  for (const auto& work : works_) parts.push_back(work->getFuture());
  auto whole = c10::make_intrusive<c10::ivalue::Future>(tensors);
  c10::collectAll(parts)->addCallback([whole, results = result()](c10::ivalue::Future& all) {
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
