#include "collectives/flight.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>

#include "core/errors.h"
#include "host/bootstrap.h"
#include "host/fd.h"
#include "host/process.h"
#include "host/shared_memory.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ringcomm::flight {
namespace {

// A closed connection tells of a death before the process has ended.
constexpr std::uint64_t kDeathGrace_ns = 1'000'000'000;

template <std::size_t kSize>
void set_text(char (&to)[kSize], const std::string& text) {
  const std::size_t num_chars = std::min(text.size(), kSize - 1);
  std::memcpy(to, text.data(), num_chars);
  std::memset(to + num_chars, 0, kSize - num_chars);
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

// An event is copied word by word, so that a reader in another thread races with nothing; the first
// word is its number.
constexpr std::size_t kNumWords = sizeof(Event) / sizeof(std::uint64_t);
using Words = std::array<std::uint64_t, kNumWords>;

// The releases keep the number 0 before what is replaced, and the number behind it.
void write(Event& to, const Event& event) {
  auto* words = reinterpret_cast<std::uint64_t*>(&to);
  const auto copy = std::bit_cast<Words>(event);
  __atomic_store_n(&words[0], std::uint64_t{0}, __ATOMIC_RELAXED);
  for (std::size_t i = 1; i < kNumWords; ++i)
    __atomic_store_n(&words[i], copy[i], __ATOMIC_RELEASE);
  __atomic_store_n(&words[0], copy[0], __ATOMIC_RELEASE);
}

void add(std::uint64_t& word, std::uint64_t number) {
  __atomic_fetch_add(&word, number, __ATOMIC_RELAXED);
}

}  // namespace

// A consistent copy, unless it is just being replaced: the acquires keep the last look behind them.
std::optional<Event> read(const Event& from) {
  const auto* words = reinterpret_cast<const std::uint64_t*>(&from);
  Words copy;
  for (std::size_t i = 0; i < kNumWords; ++i)
    copy[i] = __atomic_load_n(&words[i], __ATOMIC_ACQUIRE);
  if (copy[0] == 0 || __atomic_load_n(&words[0], __ATOMIC_RELAXED) != copy[0]) return std::nullopt;
  return std::bit_cast<Event>(copy);
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
      fd_ = shm::create_memfd(Memory::kNumBytes, "ringcomm-flight");
      mapped_ = shm::SharedMemory(fd_.get(), Memory::kNumBytes);
      Header& header = memory().header();
      header.num_bytes = Memory::kNumBytes;
      header.pid = ::getpid();
      header.anchor_ticks = ticks();
      header.anchor_ns = monotonic_ns();
      set_text(header.version, RINGCOMM_VERSION);
      std::memcpy(header.magic, Header::kMagic, sizeof header.magic);  // last: it is complete
      shm::Bootstrap::instance().share_with_watchers(fd_.get(), [this] { say_waits(); });
    } catch (const Error&) {  // no memory, descriptor or thread: nothing is recorded
      fd_.reset();
    }
  }

  int fd() const { return fd_.get(); }
  Memory memory() const { return Memory(mapped_.data()); }

  /// kNumGroups if no group has ended.
  std::uint32_t take_place() {
    const std::lock_guard lock(mutex_);
    const GroupEntry* groups = memory().groups();
    const auto is_free = [&](std::uint32_t place) {
      return groups[place].state == GroupEntry::kUnused || groups[place].state == GroupEntry::kLeft;
    };
    std::uint32_t place = next_place_;
    for (std::size_t i = 0; !is_free(place); place = (place + 1) % kNumGroups)
      if (++i == kNumGroups) return kNumGroups;
    next_place_ = (place + 1) % kNumGroups;
    GroupEntry& entry = memory().groups()[place];
    if (entry.state != GroupEntry::kUnused) {  // an untouched page stays without memory
      __atomic_store_n(&entry.state, GroupEntry::kUnused, __ATOMIC_RELEASE);
      std::fill_n(memory().counts(place), kNumMembers, PeerCounts{});
    }
    entry.number = ++num_groups_;
    return place;
  }
  void add(Log* log) {
    const std::lock_guard lock(mutex_);
    logs_.insert(log);
  }
  void remove(Log* log) {
    const std::lock_guard lock(mutex_);
    logs_.erase(log);
  }

 private:
  void say_waits() {
    const std::lock_guard lock(mutex_);
    waits_.look(memory(), logs_);
  }

  shm::UniqueFd fd_;
  shm::SharedMemory mapped_;
  std::mutex mutex_;  // guards the next ones
  bool is_opened_ = false;
  std::uint32_t next_place_ = 0, num_groups_ = 0;
  std::set<Log*> logs_;
  LongWaits waits_;
};

constinit PerProcess<Recorder> Recorder::of_process;

const bool has_cycle_counter = [] {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d >> 8 & 1) != 0;
#else
  return false;
#endif
}();

std::uint64_t monotonic_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

void start() { Recorder::of_process.get().open(); }

int descriptor() {
  const Recorder* recorder = Recorder::of_process.find();
  return recorder != nullptr ? recorder->fd() : -1;
}

std::unique_ptr<Log> Log::make(const std::string& name, int rank,
                               const std::vector<std::uint64_t>& global_ranks,
                               const std::string& transport, const Membership& members,
                               bool log_waits) {
  if (descriptor() < 0) return nullptr;
  Recorder* recorder = Recorder::of_process.find();
  const std::uint32_t place = recorder->take_place();
  if (place == kNumGroups) return nullptr;
  std::unique_ptr<Log> log(new Log(*recorder, place));
  const std::size_t world_size = members.processes().size();
  log->id_ = id_of(name, global_ranks);
  log->rank_ = rank;
  if (world_size > kNumMembers) log->own_counts_.resize(world_size);
  log->counts_ =
      world_size > kNumMembers ? log->own_counts_.data() : recorder->memory().counts(log->place_);
  long_wait_ticks =
      static_cast<std::int64_t>(Clock(recorder->memory().header()).ticks_of(kLongWait_us * 1000));
  log->processes_ = members.processes();
  log->log_waits_ = log_waits;
  GroupEntry& entry = recorder->memory().groups()[log->place_];
  entry.rank = rank;
  entry.world_size = static_cast<std::int32_t>(world_size);
  entry.culprit = -1;
  entry.id = log->id_;
  set_text(entry.name, name);
  set_text(entry.transport, transport);
  set_text(entry.failure, "");
  const auto seen_pid = [&](std::size_t member) {  // a process on this machine has an address
    const PeerProcess& process = *log->processes_[member];
    const bool is_hidden = process.bootstrap_address.empty() || process.is_pid_hidden;
    return is_hidden && static_cast<int>(member) != rank ? -1 : process.pid;
  };
  for (std::size_t i = 0; i < std::min(world_size, kNumMembers); ++i)
    entry.members[i] = {
        .pid = seen_pid(i),
        .global_rank = static_cast<std::int32_t>(i < global_ranks.size() ? global_ranks[i] : i)};
  __atomic_store_n(&entry.state, GroupEntry::kAlive, __ATOMIC_RELEASE);
  recorder->add(log.get());
  return log;
}

Log::Log(Recorder& recorder, std::uint32_t place) : recorder_(recorder), place_(place) {}

Log::~Log() {
  if (Recorder::of_process.find() != &recorder_) return;  // in a forked child
  recorder_.remove(this);
  __atomic_store_n(&recorder_.memory().groups()[place_].state, GroupEntry::kLeft, __ATOMIC_RELEASE);
}

Event event_of(const Collective& call, const CallHeader& header) {
  return {.seq = header.seq,
          .num_bytes = call.num_bytes(),
          .peer = header.root,
          .op = header.op,
          .dtype = header.dtype,
          .reduction = header.reduction,
          .algorithm = header.algorithm};
}

Call Log::begin(const Event& described) {
  const Memory memory = recorder_.memory();
  Event event = described;
  Event* place = nullptr;
  for (std::size_t i = 0; i < kNumEvents && (i == 0 || place->is_waiting()); ++i) {
    event.number = __atomic_add_fetch(&memory.header().num_calls, 1, __ATOMIC_RELAXED);
    place = &memory.events()[event.number % kNumEvents];
  }
  event.group = static_cast<std::uint16_t>(place_);
  event.begin_ticks = ticks();
  write(*place, event);
  return {place, event.number};
}

void Log::end(const Call& call) {
  if (call.is_there()) __atomic_store_n(&call.event->end_ticks, ticks(), __ATOMIC_RELAXED);
}

void Log::end_running() {
  end(std::exchange(running_, {}));
  num_calls_.store(num_calls() + 1, std::memory_order_relaxed);
  const int late = std::exchange(last_late_, kNobody);
  if (late != kNobody) add(counts_[late].num_late, 1);
}

void Log::record(const PeerEvent& event, CallStep step) {
  if (event.is_arrival) last_late_ = event.rank;
  if (event.waited_ticks > 0) return count_wait(event.rank, event.waited_ticks);
  if (event.sent_bytes + event.received_bytes == 0) return running_.record_wait(event.rank, step);
  count_bytes(event.rank, event.sent_bytes, event.received_bytes);
}

void Log::count_wait(int peer, std::uint64_t ticks) {
  if (ticks == 0 || peer < 0) return;
  add(counts_[peer].num_waits, 1);
  add(counts_[peer].waited_ns, Clock(recorder_.memory().header()).ns_of(ticks));
}

void Log::count_bytes(int peer, std::uint64_t sent, std::uint64_t received) {
  add(counts_[peer].sent_bytes, sent);
  add(counts_[peer].received_bytes, received);
}

// Where another process's rank records the group; nothing if that is not here, or has forgotten it.
std::optional<std::pair<Memory, std::uint32_t>> Log::find(int rank) const {
  const auto mapped = processes_[static_cast<std::size_t>(rank)]->flight();
  if (mapped == nullptr || mapped->num_bytes() < Memory::kNumBytes) return std::nullopt;
  const Memory memory(mapped->data());
  const GroupEntry* const groups = memory.groups();
  std::optional<std::pair<Memory, std::uint32_t>> found;
  for (std::uint32_t place = 0; place < kNumGroups; ++place)
    if (groups[place].state != GroupEntry::kUnused && groups[place].id == id_ &&
        groups[place].rank == rank &&
        (!found || groups[place].number > groups[found->second].number))
      found = {memory, place};
  return found;
}

std::vector<PeerCounts> Log::counts_of(int rank) const {
  const PeerCounts* from = counts_;
  if (rank != rank_) {
    const auto place = own_counts_.empty() ? find(rank) : std::nullopt;
    from = place ? place->first.counts(place->second) : nullptr;
  }
  std::vector<PeerCounts> counts(from != nullptr ? processes_.size() : 0);
  const auto* words = reinterpret_cast<const std::uint64_t*>(from);
  auto* copies = reinterpret_cast<std::uint64_t*>(counts.data());
  for (std::size_t i = 0; i < counts.size() * sizeof(PeerCounts) / sizeof(*words); ++i)
    copies[i] = __atomic_load_n(&words[i], __ATOMIC_RELAXED);
  return counts;
}

bool Log::is_first_alive() const {
  const bool has_failed = recorder_.memory().groups()[place_].state == GroupEntry::kFailed;
  const std::uint64_t deadline_ns = monotonic_ns() + (has_failed ? kDeathGrace_ns : 0);
  for (int rank = 0; rank < rank_;) {
    const auto place = find(rank);
    if (place && place->first.groups()[place->second].state == GroupEntry::kLeft) return false;
    if (processes_[static_cast<std::size_t>(rank)]->is_dead) {
      ++rank;
      continue;
    }
    if (monotonic_ns() >= deadline_ns) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

void Log::fail(const std::string& why, int culprit) {
  GroupEntry& entry = recorder_.memory().groups()[place_];
  entry.culprit = culprit;
  set_text(entry.failure, why);
  entry.failed_ticks = ticks();
  __atomic_store_n(&entry.state, GroupEntry::kFailed, __ATOMIC_RELEASE);
}

}  // namespace ringcomm::flight
