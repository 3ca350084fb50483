// A store that does not answer: who asks it goes on.
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/errors.h"
#include "host/timed_store.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using Clock = std::chrono::steady_clock;

// Answers unless its gate is locked.
class GatedStore final : public testing::ForwardingStore {
 public:
  GatedStore(std::shared_ptr<std::mutex> gate, testing::MemoryStore& store)
      : ForwardingStore(store), gate_(std::move(gate)) {}

  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(*gate_);
    ForwardingStore::set(key, value);
  }
  std::optional<std::string> try_get(const std::string& key) override {
    const std::lock_guard lock(*gate_);
    ++num_questions;
    if (key == "broken") throw std::runtime_error("no store");
    return ForwardingStore::try_get(key);
  }
  void set_first(const std::string& key, const std::string& value) override { set(key, value); }

  std::atomic<int> num_questions = 0;

 private:
  std::shared_ptr<std::mutex> gate_;
};

int num_helpers() {
  int found = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    found += name == "ringcomm-helper" ? 1 : 0;
  }
  return found;
}

using testing::wait_until;

TEST_CASE("store: answers and errors come back") {
  testing::MemoryStore memory;
  TimedStore store(std::make_shared<GatedStore>(std::make_shared<std::mutex>(), memory));
  CHECK_FALSE(store.try_get("key"));
  store.set("key", "text");
  CHECK(store.try_get("key") == "text");
  CHECK_THROWS_WITH_AS(store.try_get("broken"), "no store", std::runtime_error);
  wait_until([&] { return store.peek("key") == "text"; }, "an answer in time");
}

TEST_CASE("store: one that is silent costs its callers a second together, and its object's end") {
  testing::MemoryStore memory;  // outlives the thread that is left behind
  const auto gate = std::make_shared<std::mutex>();
  const auto asked = std::make_shared<GatedStore>(gate, memory);
  std::unique_lock silence(*gate);
  {
    TimedStore store(asked);
    const auto begin = Clock::now();
    CHECK_FALSE(store.peek("key"));
    for (int i = 0; i < 30; ++i) CHECK_THROWS_AS(store.try_get("key"), Error);
    CHECK_THROWS_AS(store.set("late", "written"), Error);
    CHECK(Clock::now() - begin < testing::kBound);
  }
  CHECK_FALSE(memory.try_get("late"));
  silence.unlock();
  wait_until([&] { return memory.try_get("late") == "written"; }, "an answer in time");
  wait_until([&] { return asked.use_count() == 1; }, "an answer in time");
  CHECK(asked->num_questions <= 2);  // the peek's, and that of the first call
}

TEST_CASE("store: an idle one ends with its object, and not later on the thread") {
  testing::MemoryStore memory;
  for (int i = 0; i < 1000; ++i) {
    const auto asked = std::make_shared<GatedStore>(std::make_shared<std::mutex>(), memory);
    std::make_unique<TimedStore>(asked)->set("key", "text");
    REQUIRE(asked.use_count() == 1);
  }
}

TEST_CASE("store: stores share a thread, of which a silent one keeps nobody") {
  testing::MemoryStore memory;
  const auto gate = std::make_shared<std::mutex>(), free_gate = std::make_shared<std::mutex>();
  const auto ask_some = [&] {
    std::vector<std::unique_ptr<TimedStore>> stores(8);
    for (auto& store : stores) {
      store = std::make_unique<TimedStore>(std::make_shared<GatedStore>(free_gate, memory));
      CHECK_FALSE(store->try_get("key"));
    }
  };
  // A thread is idle a moment after its last answer, and ends if another one is.
  const auto come_to = [](int num) {
    wait_until([num] { return num_helpers() == num; }, "so many threads");
  };
  ask_some();
  come_to(1);
  std::unique_lock silence(*gate);
  TimedStore silent(std::make_shared<GatedStore>(gate, memory));
  CHECK_FALSE(silent.peek("key"));
  ask_some();
  come_to(2);
  silence.unlock();
  come_to(1);
}

// ThreadSanitizer sees what the callers and the thread share.
TEST_CASE("store: one that several threads ask") {
  testing::MemoryStore memory;
  TimedStore store(std::make_shared<GatedStore>(std::make_shared<std::mutex>(), memory));
  std::atomic<bool> is_over = false;
  std::thread peeker([&] {
    while (!is_over) store.peek("key");
  });
  for (int i = 0; i < 3000; ++i) CHECK_FALSE(store.try_get("key"));
  is_over = true;
  peeker.join();
}

TEST_CASE("store: until its deadline a call waits longer") {
  testing::MemoryStore memory;
  const auto gate = std::make_shared<std::mutex>();
  TimedStore store(std::make_shared<GatedStore>(gate, memory), deadline_after(testing::kBound));
  std::atomic<bool> is_silent = false;
  std::thread silence([&] {
    const std::lock_guard lock(*gate);
    is_silent = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  });
  wait_until([&] { return is_silent.load(); }, "an answer in time");
  CHECK_FALSE(store.try_get("key"));
  silence.join();
}

}  // namespace
