#include <ATen/DeviceAccelerator.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

#include "bindings/process_group.h"

namespace ringcomm {

constexpr std::size_t kMaxFinishedWorks = 1024;  // of one coalesced block

bool ProcessGroupRingcomm::supportsCoalescing() const { return at::getAccelerator().has_value(); }

void ProcessGroupRingcomm::startCoalescing() {
  std::vector<WorkPtr> works;  // of a block that an exception left, as the next ones
  std::vector<DeviceMessage> messages;
  const std::lock_guard lock(mutex_);
  is_coalescing_ = true;
  works.swap(coalesced_works_);
  messages.swap(coalesced_messages_);
}

WorkPtr ProcessGroupRingcomm::endCoalescing() {
  std::vector<WorkPtr> works;
  std::vector<DeviceMessage> messages;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK_VALUE(is_coalescing_, "ringcomm: endCoalescing() without startCoalescing()");
    is_coalescing_ = false;
    works.swap(coalesced_works_);
    messages.swap(coalesced_messages_);
  }
  if (!messages.empty()) {
    CallInfo info(c10d::OpType::COALESCED, "ringcomm:coalesced");
    info.is_async = true;
    works.push_back(devices()->exchange(info, std::move(messages), {}));
  }
  return coalesced_work(getRank(), std::move(works));
}

WorkPtr ProcessGroupRingcomm::coalesced(WorkPtr work) {
  std::vector<WorkPtr> finished;
  const std::lock_guard lock(mutex_);
  if (!is_coalescing_ || work == nullptr) return work;
  // A block that an exception has left open must not keep all later works.
  if (coalesced_works_.size() >= kMaxFinishedWorks)
    std::erase_if(coalesced_works_, [&](const WorkPtr& other) {
      if (!other->isCompleted() || !other->isSuccess()) return false;
      finished.push_back(other);
      return true;
    });
  coalesced_works_.push_back(work);
  return work;
}

}  // namespace ringcomm
