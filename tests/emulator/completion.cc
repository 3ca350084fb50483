#include "emulator/completion.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <ctime>
#include <utility>

#include "emulator/ipc_handle.h"

namespace ringcomm::emulator {
namespace {

/// In memory that processes share, and without locks, which a killed process could hold. The slot
/// of a record holds it, or a later one of the same slot, once it is finished.
struct SharedRecords {
  static constexpr std::uint64_t kNumSlots = 1024;  // more are never outstanding
  std::atomic<std::uint64_t> last;
  std::atomic<std::uint32_t> num_finished;  // what waits sleeps on this
  std::atomic<std::uint64_t> slots[kNumSlots];

  std::atomic<std::uint64_t>& slot(std::uint64_t record) { return slots[record % kNumSlots]; }
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

class SharedCompletion final : public Completion {
 public:
  SharedCompletion(shm::UniqueFd fd, bool is_own) : fd_(std::move(fd)), is_own_(is_own) {
    void* mapped =
        mmap(nullptr, sizeof(SharedRecords), PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    records_ = mapped != MAP_FAILED ? static_cast<SharedRecords*>(mapped) : nullptr;
  }
  ~SharedCompletion() override {
    if (records_ != nullptr) munmap(records_, sizeof(SharedRecords));
  }
  bool is_mapped() const { return records_ != nullptr; }
  int fd() const { return fd_.get(); }
  bool is_own() const { return is_own_; }

  std::uint64_t begin() override { return ++records_->last; }

  void finish(std::uint64_t record) override {
    std::atomic<std::uint64_t>& slot = records_->slot(record);
    std::uint64_t before = slot;
    while (before < record && !slot.compare_exchange_weak(before, record)) {
    }
    ++records_->num_finished;
    syscall(SYS_futex, &records_->num_finished, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
  }

  bool is_finished(std::uint64_t record) override { return records_->slot(record) >= record; }

  void wait(std::uint64_t record) override {
    for (;;) {
      const std::uint32_t seen = records_->num_finished;
      if (is_finished(record)) return;
      const timespec slice = {.tv_sec = 1, .tv_nsec = 0};
      syscall(SYS_futex, &records_->num_finished, FUTEX_WAIT, seen, &slice, nullptr, 0);
    }
  }

  std::uint64_t last() override { return records_->last; }

 private:
  shm::UniqueFd fd_;
  bool is_own_;  // or another process's
  SharedRecords* records_ = nullptr;
};

}  // namespace

std::uint64_t LocalCompletion::begin() {
  const std::lock_guard lock(mutex_);
  outstanding_.insert(++last_);
  return last_;
}

void LocalCompletion::finish(std::uint64_t record) {
  const std::lock_guard lock(mutex_);
  outstanding_.erase(record);
  has_news_.notify_all();
}

bool LocalCompletion::is_finished(std::uint64_t record) {
  const std::lock_guard lock(mutex_);
  return outstanding_.count(record) == 0;
}

void LocalCompletion::wait(std::uint64_t record) {
  std::unique_lock lock(mutex_);
  has_news_.wait(lock, [&] { return outstanding_.count(record) == 0; });
}

std::uint64_t LocalCompletion::last() {
  const std::lock_guard lock(mutex_);
  return last_;
}

std::shared_ptr<Completion> make_shared_completion() {
  shm::UniqueFd fd(memfd_create("ringcomm-emulated-event", MFD_CLOEXEC));
  if (!fd || ftruncate(fd.get(), sizeof(SharedRecords)) != 0) return nullptr;
  auto made = std::make_shared<SharedCompletion>(std::move(fd), true);
  return made->is_mapped() ? made : nullptr;
}

Result export_completion(Completion& completion, IpcEventHandle* handle) {
  const auto* shared = dynamic_cast<SharedCompletion*>(&completion);
  if (shared == nullptr) return kInvalidHandle;
  return write_handle(IpcKind::kEvent, shared->fd(), handle);
}

void check_not_opened_elsewhere(Completion& completion) {
  const auto* shared = dynamic_cast<SharedCompletion*>(&completion);
  if (shared != nullptr && shared->is_own()) check_not_opened_elsewhere(shared->fd(), "an event");
}

Result import_completion(const IpcEventHandle& handle, std::shared_ptr<Completion>* completion) {
  shm::UniqueFd fd;
  RINGCOMM_TRY(open_handle(IpcKind::kEvent, &handle, &fd));
  auto made = std::make_shared<SharedCompletion>(std::move(fd), false);
  if (!made->is_mapped()) return kMapFailed;
  *completion = std::move(made);
  return kSuccess;
}

}  // namespace ringcomm::emulator
