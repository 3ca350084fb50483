#include "bindings/process_group.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "bindings/python_errors.h"
#include "bindings/store_adapter.h"
#include "bindings/tensors.h"

namespace ringcomm {
namespace {

// A deadline far enough not to matter and near enough to be added to a clock.
constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

}  // namespace

ProcessGroupRingcomm::ProcessGroupRingcomm(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                           int size, const CommunicatorOptions& options,
                                           std::chrono::milliseconds timeout)
    : Backend(rank, size), timeout_(timeout) {
  StoreAdapter adapter(store);
  with_python_errors([&] {
    communicator_ = std::make_shared<Communicator>(adapter, rank, size, options,
                                                   std::min(timeout, kLongestTimeout));
  });
}

ProcessGroupRingcomm::~ProcessGroupRingcomm() { shutdown(); }

std::shared_ptr<Communicator> ProcessGroupRingcomm::communicator() const {
  std::shared_ptr<Communicator> communicator;
  {
    const std::lock_guard lock(mutex_);
    communicator = communicator_;
  }
  TORCH_CHECK_VALUE(communicator != nullptr, "ringcomm: this process group has been destroyed");
  return communicator;
}

void ProcessGroupRingcomm::abort() {
  const std::lock_guard lock(mutex_);
  if (communicator_ != nullptr) communicator_->abort("the process group was aborted");
}

void ProcessGroupRingcomm::shutdown() {
  std::shared_ptr<Communicator> communicator;
  {
    const std::lock_guard lock(mutex_);
    communicator.swap(communicator_);
  }
  if (communicator == nullptr) return;
  if (communicator->is_inherited()) {
    // In a forked child the group is the parent's; what must not be destroyed is leaked.
    new std::shared_ptr(std::move(communicator));
    return;
  }
  without_gil([&] { communicator.reset(); });
}

std::chrono::milliseconds ProcessGroupRingcomm::effective(std::chrono::milliseconds timeout) const {
  return std::min(timeout <= kNoTimeout ? timeout_ : timeout, kLongestTimeout);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::start(c10d::OpType op_type, const char* title,
                                                       std::vector<TensorCall> calls,
                                                       std::vector<at::Tensor> results,
                                                       std::chrono::milliseconds timeout,
                                                       bool is_async) {
  const std::shared_ptr<Communicator> engine = communicator();
  auto work = c10::make_intrusive<CollectiveWork>(engine, op_type, title, std::move(calls),
                                                  std::move(results));
  if (is_async)
    CollectiveWork::submit(work, *engine, effective(timeout));
  else
    work->run(*engine, effective(timeout));
  return work;
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::barrier(const c10d::BarrierOptions& opts) {
  std::vector<TensorCall> calls(1);
  return start(c10d::OpType::BARRIER, "ringcomm:barrier", std::move(calls), {}, opts.timeout,
               opts.asyncOp);
}

void ProcessGroupRingcomm::monitoredBarrier(const c10d::BarrierOptions&, bool) {
  not_there_yet("monitored_barrier");
}

}  // namespace ringcomm
