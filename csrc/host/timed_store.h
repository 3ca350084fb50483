#pragma once

#include <memory>
#include <optional>
#include <string>

#include "host/wait.h"

namespace ringcomm {

/// What the library needs of a store that all ranks of a group share (an adapter to torch's Store).
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  /// All but is_interrupted() throw std::exception when the store cannot be reached.
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Nothing when the key is not there now.
  virtual std::optional<std::string> try_get(const std::string& key) = 0;
  /// Sets the key if it is not there yet; where the store cannot tell, in any case.
  virtual void set_first(const std::string& key, const std::string& value) = 0;
  /// Whether a signal has asked this process to stop waiting.
  virtual bool is_interrupted() { return false; }
  /// The same store for another thread: with a connection of its own, where it has connections.
  virtual std::unique_ptr<KeyValueStore> clone() = 0;
};

/// A store whose calls end in time, whatever the store does: a helper thread of this process makes
/// them, one after another. Where the store does not answer, the thread is left behind with all
/// that it uses, and another store gets a new one.
///
/// A call waits until the deadline, and at least until the thread's call has taken kSilentAfter: of
/// several calls to a silent store the first one waits. Then it throws Error, of kTimeout. What was
/// to be written is written once the store answers.
class TimedStore final : public KeyValueStore {
 public:
  using Clock = RunningClock;

  /// Where no thread can start, the callers make the calls.
  explicit TimedStore(std::shared_ptr<KeyValueStore> store, Clock::time_point deadline = {});
  ~TimedStore() override;
  /// Later calls have the second alone.
  void forget_deadline() { deadline_ = {}; }

  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> try_get(const std::string& key) override;
  void set_first(const std::string& key, const std::string& value) override;
  bool is_interrupted() override;
  /// Of the store itself, without limits.
  std::unique_ptr<KeyValueStore> clone() override;

  /// try_get() as of when the store last answered; asks again, and waits for nothing. One key for
  /// each object.
  std::optional<std::string> peek(const std::string& key);

 private:
  struct Queue;

  template <class Ask>
  auto call(Ask ask, bool is_question = false);

  Clock::time_point deadline_;
  std::shared_ptr<Queue> queue_;
};

}  // namespace ringcomm
