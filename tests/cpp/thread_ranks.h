#pragma once

// Ranks as threads of one process: they share a real group, whose memory each of them maps for
// itself. ThreadSanitizer sees such mappings as different memory; tests that are after races of a
// protocol run it on one buffer instead (test_protocols.cc).

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "communicator/communicator.h"
#include "core/arch.h"
#include "core/errors.h"
#include "host/group.h"
#include "host/timed_store.h"

namespace ringcomm::testing {

/// ThreadSanitizer does not see the rounds between ranks that are threads, since each maps the
/// group's memory for itself: large amounts of data through that memory tell it nothing.
#ifdef __SANITIZE_THREAD__
inline constexpr bool kHasThreadSanitizer = true;
#else
inline constexpr bool kHasThreadSanitizer = false;
#endif

/// In a child that is forked while another thread allocates, AddressSanitizer's allocator may wait
/// for ever: seen with GCC 12 in a program that does nothing else.
#ifdef __SANITIZE_ADDRESS__
inline constexpr bool kHasAddressSanitizer = true;
#else
inline constexpr bool kHasAddressSanitizer = false;
#endif

/// Longer than anything takes on a loaded machine: under ThreadSanitizer 20 MiB of messages have
/// taken more than 60 s beside ten busy processes.
inline constexpr std::chrono::seconds kBound{kHasThreadSanitizer ? 300 : 60};

/// Asks another store, which outlives it.
class ForwardingStore : public KeyValueStore {
 public:
  explicit ForwardingStore(KeyValueStore& whole) : whole_(whole) {}
  void set(const std::string& key, const std::string& value) override { whole_.set(key, value); }
  std::optional<std::string> try_get(const std::string& key) override {
    return whole_.try_get(key);
  }
  void set_first(const std::string& key, const std::string& value) override {
    whole_.set_first(key, value);
  }
  std::unique_ptr<KeyValueStore> clone() override { return whole_.clone(); }

 private:
  KeyValueStore& whole_;
};

/// A store in this process's memory.
class MemoryStore final : public KeyValueStore {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    has_news_.notify_all();
  }
  /// Waits for the key. False when it does not appear in time.
  bool get(const std::string& key, std::chrono::milliseconds timeout, std::string& value) {
    std::unique_lock lock(mutex_);
    if (!has_news_.wait_for(lock, timeout, [&] { return values_.count(key) > 0; })) return false;
    value = values_[key];
    return true;
  }
  std::optional<std::string> try_get(const std::string& key) override {
    std::string value;
    if (!get(key, std::chrono::milliseconds(0), value)) return {};
    return value;
  }
  void set_first(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_.emplace(key, value);
    has_news_.notify_all();
  }
  std::unique_ptr<KeyValueStore> clone() override {
    return std::make_unique<ForwardingStore>(*this);
  }

 private:
  std::mutex mutex_;
  std::condition_variable has_news_;
  std::map<std::string, std::string> values_;
};

/// A group of ranks on one host, without a Communicator.
inline host::Group make_group(KeyValueStore& store, const host::GroupTerms& terms,
                              const host::SegmentConfig& config,
                              std::chrono::milliseconds timeout) {
  host::Rendezvous rendezvous(store, terms, timeout);
  try {
    rendezvous.find_ranks();
    std::vector<int> ranks(static_cast<std::size_t>(terms.world_size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return host::Group(rendezvous, ranks, config);
  } catch (const Error& error) {
    rendezvous.report_failure(error);
    throw;
  }
}

/// Throws unless `is_true`; for rank threads, where doctest's macros are of no use.
inline void expect(bool is_true, const std::string& what) {
  if (!is_true) throw std::logic_error("expected: " + what);
}

/// The results of the threads of one run.
class Outcome {
 public:
  explicit Outcome(int num_ranks) : is_over_(static_cast<std::size_t>(num_ranks)) {}

  void end(int rank, const std::string& failure) {
    const std::lock_guard lock(mutex_);
    is_over_[static_cast<std::size_t>(rank)] = true;
    if (!failure.empty() && failure_.empty())
      failure_ = "rank " + std::to_string(rank) + ": " + failure;
    ++num_over_;
    changed_.notify_all();
  }

  /// Waits for all; a rank that hangs ends the process, as a thread cannot be ended.
  void join(std::chrono::seconds bound) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, bound, [&] { return num_over_ == is_over_.size(); })) {
      for (std::size_t rank = 0; rank < is_over_.size(); ++rank)
        if (!is_over_[rank]) std::fprintf(stderr, "run_ranks: rank %zu hangs\n", rank);
      std::fprintf(stderr, "run_ranks: first failure: %s\n", failure_.c_str());
      std::abort();
    }
  }

  const std::string& failure() const { return failure_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> is_over_;
  std::size_t num_over_ = 0;
  std::string failure_;
};

/// Runs body(rank) on one thread per rank; throws the first failure, with its rank.
inline void run_threads(int num_ranks, const std::function<void(int)>& body,
                        std::chrono::seconds bound = kBound) {
  Outcome outcome(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank)
    threads.emplace_back([&, rank] {
      std::string failure;
      try {
        body(rank);
      } catch (const std::exception& error) {
        failure = error.what();
      }
      outcome.end(rank, failure);
    });
  outcome.join(bound);
  for (std::thread& thread : threads) thread.join();
  if (!outcome.failure().empty()) throw std::runtime_error(outcome.failure());
}

/// Runs body(communicator) on one thread per rank of a new group.
inline void run_ranks(int world_size, const std::function<void(Communicator&)>& body,
                      const CommunicatorOptions& options = {}) {
  MemoryStore store;
  run_threads(world_size, [&](int rank) {
    Communicator communicator(store, rank, world_size, options, kBound);
    body(communicator);
  });
}

/// The limits of an operation that is expected to succeed, and of one that is not.
inline WaitLimits within(std::chrono::milliseconds timeout) {
  return {.timeout = timeout, .is_interrupted = {}};
}
inline const WaitLimits kPatient = within(kBound);

/// A barrier of all ranks, in the calling rank's order.
inline void barrier(Communicator& communicator, const WaitLimits& limits = kPatient) {
  communicator.run({{.op = OpKind::kBarrier}}, limits);
}

/// The Error that `body` throws; fails when it throws none.
template <class Body>
Error error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  throw std::logic_error("expected: an Error");
}

/// Throws unless `error` has `kind` and its message contains all of `texts`.
inline void expect_error(const Error& error, ErrorKind kind,
                         const std::vector<std::string>& texts = {}) {
  const std::string what = error.what();
  expect(error.info().kind == kind,
         "an error of kind " + std::to_string(static_cast<int>(kind)) + ", not " +
             std::to_string(static_cast<int>(error.info().kind)) + ": " + what);
  for (const std::string& text : texts)
    expect(what.find(text) != std::string::npos, "\"" + text + "\" in: " + what);
}

/// Throws unless `body` throws an `E` whose text contains all of `texts`.
template <class E, class Body>
void expect_throws(const Body& body, const std::vector<std::string>& texts) {
  std::string what = "nothing";
  try {
    body();
  } catch (const E& error) {
    what = error.what();
  }
  for (const std::string& text : texts)
    expect(what.find(text) != std::string::npos, "an error with \"" + text + "\", not " + what);
}

/// Waits until `condition` holds; throws when it does not in time.
inline void wait_until(const std::function<bool()>& condition, const char* what,
                       std::chrono::milliseconds bound = kBound) {
  const auto deadline = std::chrono::steady_clock::now() + bound;
  while (!condition()) {
    expect(std::chrono::steady_clock::now() < deadline, what);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// ---- what ends the waits of protocols without a group

/// Waits end in half a minute: a lost wake-up or credit is a failure then and not a hang.
class Patience final : public WaitGuard {
 public:
  WaitStatus check(int) override {
    return std::chrono::steady_clock::now() < deadline_ ? WaitStatus::kNone : WaitStatus::kTimeout;
  }

 private:
  std::chrono::steady_clock::time_point deadline_ =
      std::chrono::steady_clock::now() + std::chrono::seconds(30);
};

/// Waits end by themselves only.
class NoStop final : public WaitGuard {
 public:
  WaitStatus check(int) override { return WaitStatus::kNone; }
};

/// No wait sleeps.
class Refusal final : public WaitGuard {
 public:
  explicit Refusal(WaitStatus why) : why_(why) {}
  WaitStatus check(int peer) override {
    last_peer_ = peer;
    return why_;
  }
  int last_peer() const { return last_peer_; }

 private:
  WaitStatus why_;
  int last_peer_ = -1;
};

}  // namespace ringcomm::testing
