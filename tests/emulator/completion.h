#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>

#include "emulator/exports.h"

namespace ringcomm::emulator {

/// Which records of an event were made, and which of them the streams have reached. Records have
/// numbers from 1.
class Completion {
 public:
  virtual ~Completion() = default;
  virtual std::uint64_t begin() = 0;
  virtual void finish(std::uint64_t record) = 0;
  virtual bool is_finished(std::uint64_t record) = 0;
  virtual void wait(std::uint64_t record) = 0;
  virtual std::uint64_t last() = 0;  ///< 0: none was made
};

/// Of an event that only this process has.
class LocalCompletion final : public Completion {
 public:
  std::uint64_t begin() override;
  void finish(std::uint64_t record) override;
  bool is_finished(std::uint64_t record) override;
  void wait(std::uint64_t record) override;
  std::uint64_t last() override;

 private:
  std::mutex mutex_;
  std::condition_variable has_news_;
  std::uint64_t last_ = 0;
  std::set<std::uint64_t> outstanding_;
};

/// Ends this process if another has the event open, which this one has made.
void check_not_opened_elsewhere(Completion& completion);

/// Of an event that processes share: null where the system refuses its memory.
std::shared_ptr<Completion> make_shared_completion();
Result export_completion(Completion& completion, IpcEventHandle* handle);
Result import_completion(const IpcEventHandle& handle, std::shared_ptr<Completion>* completion);

}  // namespace ringcomm::emulator
