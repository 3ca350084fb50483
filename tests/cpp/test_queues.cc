// Work that another thread does for its callers. The queue of a communicator: order, the thread
// that runs a task, and the end of waits. A store that does not answer: who asks it goes on.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "communicator/ordered_queue.h"
#include "core/errors.h"
#include "host/timed_store.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using testing::expect;

// Holds a task until it is opened.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    is_open_ = true;
    opened_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    ++num_came_;
    opened_.wait(lock, [&] { return is_open_; });
  }
  int num_came() {
    const std::lock_guard lock(mutex_);
    return num_came_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool is_open_ = false;
  int num_came_ = 0;
};

TEST_CASE("run with nothing before it runs in the caller's thread") {
  OrderedQueue queue;
  std::thread::id runner;
  queue.run([&](auto) { runner = std::this_thread::get_id(); }, {});
  CHECK(runner == std::this_thread::get_id());
}

TEST_CASE("a call inside a task is refused before it is in the queue") {
  for (const bool is_left_to_thread : {false, true}) {
    OrderedQueue queue;
    if (is_left_to_thread) queue.leave_to_thread();
    std::string text;
    int num_runs = 0;
    queue.run(
        [&](auto) {
          ++num_runs;
          try {
            queue.run([&](auto) { ++num_runs; }, {});
          } catch (const Error& error) {
            text = error.what();
          }
        },
        {});
    queue.drain({});
    CHECK(text.find("inside another one") != std::string::npos);
    CHECK(num_runs == 1);
  }
}

TEST_CASE("tasks run one at a time and in order, whichever threads submit or wait") {
  constexpr int kNumTasks = 300;
  OrderedQueue queue;
  std::vector<std::uint64_t> order;  // unguarded: the queue is the guard, ThreadSanitizer the judge
  std::atomic<int> num_inside = 0;
  std::atomic<bool> has_overlap = false;
  std::vector<OrderedQueue::Request> requests;
  for (int i = 0; i < kNumTasks; ++i) {
    const auto task = [&](std::uint64_t number) {
      if (++num_inside > 1) has_overlap = true;
      order.push_back(number);
      --num_inside;
    };
    if (i % 7 == 6)
      queue.run(task, {});
    else
      requests.push_back(queue.submit(task));
    if (i % 50 == 49) queue.wait(requests.back(), {});
  }
  for (const auto& request : requests) queue.wait(request, {});
  std::vector<std::uint64_t> numbers(kNumTasks);
  std::iota(numbers.begin(), numbers.end(), std::uint64_t{0});
  CHECK(order == numbers);
  CHECK(queue.next_number() == kNumTasks);
  CHECK_FALSE(has_overlap);
}

TEST_CASE("tasks of many threads are each run once, and done when a wait returns") {
  constexpr int kNumThreads = 4;
  constexpr int kNumTasks = 200;
  OrderedQueue queue;
  int num_run = 0;  // unguarded on purpose
  bool has_other_number = false;
  testing::run_threads(kNumThreads, [&](int rank) {
    for (int i = 0; i < kNumTasks; ++i) {
      bool is_run = false;
      const auto task = [&](std::uint64_t number) {
        has_other_number |= number != static_cast<std::uint64_t>(num_run);
        ++num_run;
        is_run = true;
      };
      if ((i + rank) % 3 == 0) {
        queue.run(task, {});
      } else if ((i + rank) % 3 == 1) {
        queue.wait(queue.submit(task), {});
      } else {
        expect(queue.wait(queue.submit(task), {}, OrderedQueue::Clock::now() + testing::kBound),
               "a task run by others");
      }
      expect(is_run, "the task has run");
    }
  });
  queue.run([&](auto) { CHECK(num_run == kNumThreads * kNumTasks); }, {});
  CHECK_FALSE(has_other_number);
}

TEST_CASE("a wait behind a stream of short tasks polls all the same") {
  OrderedQueue queue;
  std::atomic<bool> is_polled = false;
  OrderedQueue::Request last;
  for (int i = 0; i < 400; ++i)
    last = queue.submit([&](auto) {
      if (!is_polled) std::this_thread::sleep_for(milliseconds(5));
    });
  queue.wait(last, [&] { is_polled = true; }, OrderedQueue::Clock::now() + testing::kBound);
  CHECK(is_polled);
}

TEST_CASE("a wait with a deadline leaves a task that takes long, and polls meanwhile") {
  OrderedQueue queue;
  Gate gate;
  const auto request = queue.submit([&](auto) { gate.pass(); });
  std::atomic<int> num_polls = 0;
  const auto begin = OrderedQueue::Clock::now();
  CHECK_FALSE(queue.wait(request, [&] { ++num_polls; }, begin + milliseconds(180)));
  CHECK(OrderedQueue::Clock::now() - begin >= milliseconds(180));
  CHECK(num_polls >= 2);
  CHECK_FALSE(queue.wait(request, {}, begin));  // a deadline in the past
  gate.open();
  queue.wait(request, {});
  CHECK(queue.wait(request, {}, begin));  // done, so late or not
}

TEST_CASE("threads that wait for different requests all return") {
  OrderedQueue queue;
  Gate gate;
  std::vector<OrderedQueue::Request> requests;
  requests.push_back(queue.submit([&](auto) { gate.pass(); }));
  for (int i = 0; i < 5; ++i) requests.push_back(queue.submit([](auto) {}));
  std::atomic<int> num_polls = 0;
  std::thread opener([&] {
    testing::wait_until([&] { return num_polls >= 6 && gate.num_came() == 1; }, "polls");
    gate.open();
  });
  testing::run_threads(6, [&](int rank) {
    const auto& request = requests[static_cast<std::size_t>(5 - rank)];
    queue.wait(request, [&] { ++num_polls; });
    expect(queue.wait(request, {}, OrderedQueue::Clock::time_point()), "a done request");
  });
  opener.join();
}

TEST_CASE("a task may wait for another thread that puts tasks in") {
  OrderedQueue queue;
  OrderedQueue::Request inner;
  bool is_inner_run = false;
  queue.run(
      [&](auto) {
        std::thread other([&] { inner = queue.submit([&](auto) { is_inner_run = true; }); });
        other.join();
        CHECK_FALSE(queue.wait(inner, {}, OrderedQueue::Clock::time_point()));
      },
      {});
  queue.wait(inner, {});
  CHECK(is_inner_run);
}

TEST_CASE("a task's captures go when it has run, not with its request") {
  OrderedQueue queue;
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watched = held;
  const auto request = queue.submit([held = std::move(held)](auto) {});
  queue.wait(request, {});
  CHECK(watched.expired());
}

TEST_CASE("destruction runs what is in") {
  int num_run = 0;
  {
    OrderedQueue queue;
    for (int i = 0; i < 50; ++i) queue.submit([&](auto) { ++num_run; });
  }
  CHECK(num_run == 50);
  {
    const OrderedQueue unused;
  }
}

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
