#include "collectives/recorder.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "core/errors.h"
#include "host/bootstrap.h"
#include "host/fd.h"
#include "host/process.h"
#include "host/shared_arena.h"
#include "host/shared_memory.h"
#include "host/threads.h"

namespace ringcomm::recorder {
namespace {

template <std::size_t kSize>
void set_text(char (&to)[kSize], const std::string& text) {
  std::snprintf(to, kSize, "%s", text.c_str());
}

// The same on all ranks of a group: of its name and its ranks.
std::uint64_t id_of(const std::string& name, const std::vector<std::uint64_t>& global_ranks) {
  std::uint64_t id = std::hash<std::string>{}(name);
  for (const std::uint64_t rank : global_ranks) {
    id = (id ^ rank) * 0x9e3779b97f4a7c15U;
    id ^= id >> 29;
  }
  return id;
}

void add(std::uint64_t& word, std::uint64_t number) {
  __atomic_fetch_add(&word, number, __ATOMIC_RELAXED);
}

// The first word is the number.
constexpr std::size_t kNumWords = sizeof(Event) / sizeof(std::uint64_t);
using Words = std::array<std::uint64_t, kNumWords>;

}  // namespace

// The releases keep the number 0 before what is replaced, and the number behind it.
void write(Event& to, const Event& event) {
  auto* words = reinterpret_cast<std::uint64_t*>(&to);
  const auto copy = std::bit_cast<Words>(event);
  __atomic_store_n(&words[0], std::uint64_t{0}, __ATOMIC_RELAXED);
  for (std::size_t i = 1; i < kNumWords; ++i)
    __atomic_store_n(&words[i], copy[i], __ATOMIC_RELEASE);
  __atomic_store_n(&words[0], copy[0], __ATOMIC_RELEASE);
}

// The acquires keep the last look behind them.
std::optional<Event> read(const Event& from) {
  const auto* words = reinterpret_cast<const std::uint64_t*>(&from);
  Words copy;
  for (std::size_t i = 0; i < kNumWords; ++i)
    copy[i] = __atomic_load_n(&words[i], __ATOMIC_ACQUIRE);
  if (copy[0] == 0 || __atomic_load_n(&words[0], __ATOMIC_RELAXED) != copy[0]) return std::nullopt;
  return std::bit_cast<Event>(copy);
}

Call put(Event* ring, std::size_t capacity, std::uint64_t& num_events, Event event) {
  Event* place = nullptr;
  for (std::size_t i = 0; i < capacity && (i == 0 || place->is_waiting()); ++i) {
    event.number = __atomic_add_fetch(&num_events, 1, __ATOMIC_RELAXED);
    place = &ring[event.number % capacity];
  }
  if (event.begin_ticks == 0) event.begin_ticks = ticks();
  write(*place, event);
  return {place, event.number};
}

class Recorder {
 public:
  static constinit PerProcess<Recorder> of_process;

  /// Once. Not in the constructor: of several threads that make one, all but one throw theirs away.
  void open() {
    const std::lock_guard lock(mutex_);
    if (is_opened_) return;
    is_opened_ = true;
    try {
      fd_ = host::create_memfd(Memory::kNumBytes, "ringcomm-flight");
      mapped_ = host::SharedMemory(fd_.get(), Memory::kNumBytes);
      Header& header = memory().header();
      header.num_bytes = Memory::kNumBytes;
      header.pid = ::getpid();
      header.start = Anchor::now();
      set_text(header.version, RINGCOMM_VERSION);
      std::memcpy(header.magic, Header::kMagic, sizeof header.magic);  // last: it is complete
      host::Bootstrap::instance().share_with_watchers(fd_.get(), [this] {
        const std::lock_guard look(mutex_);
        waits_.look(memory(), groups_);
        const auto now = std::chrono::steady_clock::now();  // Bootstrap looks at each event, too
        if (now < next_trim_) return;
        next_trim_ = now + host::SharedArena::kTrimInterval;
        run_aside([this] { trim(); });  // not in this thread, which must see that peers die
      });
    } catch (const Error&) {  // no memory, descriptor or thread: nothing is recorded
      fd_.reset();
    }
  }

  int fd() const { return fd_.get(); }
  Memory memory() const { return Memory(mapped_.data()); }

  /// Gives a group a number whose place no living group has; 0 if they have all.
  std::uint64_t add(RecordedGroup* group) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < kNumGroups; ++i) {
      GroupEntry& entry = memory().group(++num_groups_);
      const std::uint32_t state = __atomic_load_n(&entry.state, __ATOMIC_ACQUIRE);
      if (state != GroupEntry::kUnused && state != GroupEntry::kLeft) continue;
      // Before any other change, for readers in other processes.
      __atomic_store_n(&entry.state, GroupEntry::kMade, __ATOMIC_RELAXED);
#if !defined(__SANITIZE_THREAD__)  // which ignores fences; GCC warns of that
      std::atomic_thread_fence(std::memory_order_release);
#endif
      if (state == GroupEntry::kLeft)  // an untouched page stays without memory
        std::fill_n(memory().counts(num_groups_), kNumMembers, PeerCounts{});
      groups_.insert(group);
      return group->number = entry.number = num_groups_;
    }
    return 0;
  }
  void remove(RecordedGroup* group) {
    const std::lock_guard lock(mutex_);
    groups_.erase(group);
  }

 private:
  // Returns the memory of idle groups and unused buffers to the system.
  void trim() {
    std::vector<std::shared_ptr<Look>> looks;
    {
      const std::lock_guard lock(mutex_);
      for (const RecordedGroup* group : groups_) looks.push_back(group->look);
    }
    for (const auto& look : looks) {
      const std::lock_guard lock(look->mutex);
      if (look->run) look->run();
    }
    if (host::SharedArena* arena = host::SharedArena::find())
      arena->trim(host::SharedArena::Clock::now());
  }

  host::UniqueFd fd_;
  host::SharedMemory mapped_;
  std::mutex mutex_;  // guards the next ones
  bool is_opened_ = false;
  std::uint64_t num_groups_ = 0;
  std::set<RecordedGroup*> groups_;
  LongWaits waits_;
  std::chrono::steady_clock::time_point next_trim_ =
      std::chrono::steady_clock::now() + host::SharedArena::kTrimInterval;
};

constinit PerProcess<Recorder> Recorder::of_process;

void start() { Recorder::of_process.get().open(); }

int descriptor() {
  const Recorder* recorder = Recorder::of_process.find();
  return recorder != nullptr ? recorder->fd() : -1;
}

Event event_of(const Collective& call, std::uint32_t group) {
  Event event{.seq = call.seq,
              .num_bytes = call.num_bytes(),
              .group = group,
              .peer = rank16(call.root),
              .op = call.op,
              .dtype = call.dtype,
              .reduction = call.reduction,
              .algorithm = call.algorithm};
  if (event.is_message()) event.kind = Kind::kMessage;
  return event;
}

std::uint32_t unlisted_group() {
  static std::atomic<std::uint32_t> last = 0;
  return --last;
}

std::unique_ptr<Log> Log::make(const std::string& name, int rank,
                               const std::vector<std::uint64_t>& global_ranks,
                               const std::string& transport, const GroupState& state,
                               bool log_waits) {
  if (descriptor() < 0) return nullptr;
  Recorder& recorder = *Recorder::of_process.find();
  std::unique_ptr<Log> log(new Log(recorder, {.id = id_of(name, global_ranks),
                                              .rank = rank,
                                              .processes = state.processes(),
                                              .log_waits = log_waits}));
  if (recorder.add(&log->group_) == 0) return nullptr;
  if (log->own_counts_.empty()) log->counts_ = recorder.memory().counts(log->group_.number);
  const Anchor start = recorder.memory().header().start;
  const Anchor now = Anchor::now();
  if (now.ticks > start.ticks)
    ns_per_tick =
        static_cast<double>(now.ns - start.ns) / static_cast<double>(now.ticks - start.ticks);
  const PeerProcesses& processes = log->group_.processes;
  GroupEntry& entry = log->entry();
  entry.rank = rank;
  entry.world_size = static_cast<std::int32_t>(processes.size());
  entry.culprit = kNobody;
  entry.id = log->group_.id;
  set_text(entry.name, name);
  set_text(entry.transport, transport);
  set_text(entry.failure, "");
  const auto seen_pid = [&](std::size_t member) {  // a process on this machine has an address
    const PeerProcess& process = *processes[member];
    const bool is_hidden = process.bootstrap_address.empty() || process.is_pid_hidden;
    return is_hidden && static_cast<int>(member) != rank ? -1 : process.pid;
  };
  for (std::size_t i = 0; i < std::min(processes.size(), kNumMembers); ++i)
    entry.members[i] = {
        .pid = seen_pid(i),
        .global_rank = static_cast<std::int32_t>(i < global_ranks.size() ? global_ranks[i] : i)};
  __atomic_store_n(&entry.state, GroupEntry::kAlive, __ATOMIC_RELEASE);
  return log;
}

Log::Log(Recorder& recorder, RecordedGroup group)
    : recorder_(recorder),
      group_(std::move(group)),
      own_counts_(group_.processes.size() > kNumMembers ? group_.processes.size() : 0),
      counts_(own_counts_.data()) {}

Log::~Log() {
  if (number() == 0 || Recorder::of_process.find() != &recorder_) return;  // a forked child
  recorder_.remove(&group_);
  __atomic_store_n(&entry().state, GroupEntry::kLeft, __ATOMIC_RELEASE);
}

void Log::on_look(std::function<void()> look) {
  if (Recorder::of_process.find() != &recorder_) return;
  const std::lock_guard lock(group_.look->mutex);
  group_.look->run = std::move(look);
}

GroupEntry& Log::entry() const { return recorder_.memory().group(group_.number); }

Call Log::begin(const Event& event) {
  const Memory memory = recorder_.memory();
  return put(&memory.event(0), kNumEvents, memory.header().num_calls, event);
}

void Log::end_running() {
  std::exchange(running_, {}).end();
  const int late = std::exchange(last_late_, kNobody);
  if (late != kNobody) add(counts_[late].num_late, 1);
}

void Log::fail(const std::string& why, int culprit) {
  entry().culprit = culprit;
  set_text(entry().failure, why);
  entry().failed_ticks = ticks();
  __atomic_store_n(&entry().state, GroupEntry::kFailed, __ATOMIC_RELEASE);
}

void Log::record(const PeerEvent& event, CallStep step) {
  if (event.begin_ticks == 0)
    return count_bytes(event.rank, event.sent_bytes, event.received_bytes);
  if (event.end_ticks == 0) return running_.record_wait(event.rank, step);
  const std::uint64_t waited_ns = long_wait_ns(event.end_ticks - event.begin_ticks);
  if (waited_ns > 0 && event.is_arrival) last_late_ = event.rank;
  count_wait(event.rank, waited_ns);
}

void Log::count_wait(int peer, std::uint64_t waited_ns) {
  if (waited_ns == 0 || peer < 0) return;
  add(counts_[peer].num_waits, 1);
  add(counts_[peer].waited_ns, waited_ns);
}

void Log::count_bytes(int peer, std::uint64_t sent, std::uint64_t received) {
  add(counts_[peer].sent_bytes, sent);
  add(counts_[peer].received_bytes, received);
}

std::vector<PeerCounts> Log::counts() const {
  std::vector<PeerCounts> counts(group_.processes.size());
  const auto* words = reinterpret_cast<const std::uint64_t*>(counts_);
  auto* copies = reinterpret_cast<std::uint64_t*>(counts.data());
  for (std::size_t i = 0; i < counts.size() * sizeof(PeerCounts) / sizeof(*words); ++i)
    copies[i] = __atomic_load_n(&words[i], __ATOMIC_RELAXED);
  return counts;
}

}  // namespace ringcomm::recorder
