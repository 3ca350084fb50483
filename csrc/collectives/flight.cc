#include "collectives/flight.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "core/errors.h"
#include "transport/process.h"
#include "transport/shm/bootstrap.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ringcomm::flight {
namespace {

// When a wait is said, in seconds since the call began.
constexpr std::uint64_t kSaidAfter_s[] = {10, 60, 300};

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

// "4 MiB", "1.5 KiB", "12 bytes"
std::string size_text(std::uint64_t num_bytes) {
  static constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB"};
  auto size = static_cast<double>(num_bytes);
  std::size_t unit = 0;
  for (; size >= 1024 && unit + 1 < std::size(kUnits); ++unit) size /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, "%.4g %s", size, kUnits[unit]);
  return text;
}

std::string call_text(const Event& event) {
  const bool is_message = event.op == OpKind::kSend || event.op == OpKind::kRecv;
  const std::string number =
      is_message ? " with tag " + std::to_string(event.seq) : " #" + std::to_string(event.seq);
  return name_of(event.op) + number + " (" + size_text(event.num_bytes) + ")";
}

// An event is copied word by word, so that a reader in another thread races with nothing; the first
// word is its number.
constexpr std::size_t kNumWords = sizeof(Event) / sizeof(std::uint64_t);
using Words = std::array<std::uint64_t, kNumWords>;

// A consistent copy, unless it is just being replaced: the acquires keep the last look behind them.
std::optional<Event> read(const Event& from) {
  const auto* words = reinterpret_cast<const std::uint64_t*>(&from);
  Words copy;
  for (std::size_t i = 0; i < kNumWords; ++i)
    copy[i] = __atomic_load_n(&words[i], __ATOMIC_ACQUIRE);
  if (copy[0] == 0 || __atomic_load_n(&words[0], __ATOMIC_RELAXED) != copy[0]) return std::nullopt;
  return std::bit_cast<Event>(copy);
}

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

/// Turns ticks of this machine into durations.
class Clock {
 public:
  explicit Clock(const Header& header) : now_(ticks()) {
    const std::uint64_t passed_ns = monotonic_ns() - header.anchor_ns;
    const std::uint64_t passed = now_ - header.anchor_ticks;
    ns_per_tick_ = passed > 0 ? static_cast<double>(passed_ns) / static_cast<double>(passed) : 1;
  }
  std::uint64_t seconds_since(std::uint64_t then) const {
    return then >= now_ ? 0 : ns_of(now_ - then) / 1'000'000'000;
  }
  std::uint64_t ns_of(std::uint64_t ticks) const {
    return static_cast<std::uint64_t>(static_cast<double>(ticks) * ns_per_tick_);
  }
  std::uint64_t ticks_of(std::uint64_t ns) const {
    return static_cast<std::uint64_t>(static_cast<double>(ns) / ns_per_tick_);
  }

 private:
  std::uint64_t now_;
  double ns_per_tick_;
};

}  // namespace

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

  std::uint32_t take_place() {
    const std::lock_guard lock(mutex_);
    const GroupEntry* groups = memory().groups();
    const auto is_free = [&](std::uint32_t place) {
      return groups[place].state == GroupEntry::kUnused || groups[place].state == GroupEntry::kLeft;
    };
    std::uint32_t place = next_place_;
    for (std::size_t i = 0; i < kNumGroups && !is_free(place); ++i)
      place = (place + 1) % kNumGroups;
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
  // On the bootstrap's thread, every few seconds.
  void say_waits() {
    const std::lock_guard lock(mutex_);
    if (logs_.empty()) return;
    const Clock clock(memory().header());
    std::map<std::uint64_t, std::size_t> still;
    for (std::size_t i = 0; i < kNumEvents; ++i) {
      const std::optional<Event> event = read(memory().events()[i]);
      if (!event || event->end_ticks != 0 || event->waits_for == kNobody) continue;
      const auto log = std::ranges::find_if(
          logs_, [&](const Log* each) { return each->place_ == event->group; });
      if (log == logs_.end() || !(*log)->says_waits_) continue;
      const std::uint64_t waited_s = clock.seconds_since(event->begin_ticks);
      std::size_t& num_said = still[event->number] = num_said_[event->number];
      if (num_said == std::size(kSaidAfter_s) || waited_s < kSaidAfter_s[num_said]) continue;
      while (num_said < std::size(kSaidAfter_s) && waited_s >= kSaidAfter_s[num_said]) ++num_said;
      say(**log, *event, clock);
    }
    num_said_ = std::move(still);
  }

  void say(const Log& log, const Event& event, const Clock& clock) const {
    std::string line = log.prefix_ + call_text(event) + " waits for ";
    const auto idx = static_cast<std::size_t>(event.waits_for);
    if (event.waits_for < 0 || idx >= log.processes_.size()) {
      line += "any rank";
    } else {
      const PeerProcess& peer = *log.processes_[idx];
      line += "rank " + std::to_string(event.waits_for) + " (pid " + std::to_string(peer.pid) +
              " on " + peer.host;
      if (!peer.bootstrap_address.empty())
        line += peer.is_dead ? ", ended" : peer.is_stopped() ? ", stopped" : ", running";
      line += last_call_of(peer, log.id_, clock) + ")";
    }
    line += " for " + std::to_string(clock.seconds_since(event.begin_ticks)) +
            " s; `ringcomm doctor --job " + std::to_string(::getpid()) + "` shows all ranks\n";
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  }

  // The last one in the group `id`.
  static std::string last_call_of(const PeerProcess& peer, std::uint64_t id, const Clock& clock) {
    const auto mapped = peer.flight();
    if (mapped == nullptr || mapped->num_bytes() < Memory::kNumBytes) return {};
    const Memory memory(mapped->data());
    std::optional<Event> last;
    for (std::size_t i = 0; i < kNumEvents; ++i) {
      const std::optional<Event> event = read(memory.events()[i]);
      if (!event || event->group >= kNumGroups || memory.groups()[event->group].id != id) continue;
      if (!last || event->number > last->number) last = event;
    }
    if (!last) return ", no call yet";
    const std::uint64_t end = last->end_ticks;
    const bool is_over = end != 0 || last->on_device != 0;
    const std::uint64_t since = clock.seconds_since(end != 0 ? end : last->begin_ticks);
    return (is_over ? ", last call: " : ", in ") + call_text(*last) + " " + std::to_string(since) +
           (is_over ? " s ago" : " s");
  }

  shm::UniqueFd fd_;
  shm::SharedMemory mapped_;
  std::mutex mutex_;  // guards the next ones
  bool is_opened_ = false;
  std::uint32_t next_place_ = 0, num_groups_ = 0;
  std::set<Log*> logs_;
  std::map<std::uint64_t, std::size_t> num_said_;  // of the calls that wait, by their numbers
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
                               bool says_waits) {
  if (descriptor() < 0) return nullptr;
  Recorder* recorder = Recorder::of_process.find();
  std::unique_ptr<Log> log(new Log(*recorder, recorder->take_place()));
  const std::size_t world_size = members.processes().size();
  log->id_ = id_of(name, global_ranks);
  log->rank_ = rank;
  if (world_size > kNumMembers) log->own_counts_.resize(world_size);
  log->counts_ =
      world_size > kNumMembers ? log->own_counts_.data() : recorder->memory().counts(log->place_);
  long_wait_ticks = Clock(recorder->memory().header()).ticks_of(kLongWait_us * 1000);
  log->prefix_ = "ringcomm rank " + std::to_string(rank) + "/" + std::to_string(world_size) + ": ";
  log->processes_ = members.processes();
  log->says_waits_ = says_waits;
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
  event.number = __atomic_add_fetch(&memory.header().num_calls, 1, __ATOMIC_RELAXED);
  event.group = static_cast<std::uint16_t>(place_);
  event.begin_ticks = ticks();
  Event& place = memory.events()[event.number % kNumEvents];
  write(place, event);
  return {&place, event.number};
}

void Log::end(const Call& call) {
  if (call.event == nullptr ||
      __atomic_load_n(&call.event->number, __ATOMIC_RELAXED) != call.number)
    return;
  __atomic_store_n(&call.event->end_ticks, ticks(), __ATOMIC_RELAXED);
}

void Log::end_running() {
  end(std::exchange(running_, {}));
  num_calls_.store(num_calls() + 1, std::memory_order_relaxed);
  const int late = std::exchange(last_late_, kNobody);
  if (late != kNobody) add(counts_[late].num_late, 1);
}

void Log::keep(const PeerNote& note, CallStep step) {
  if (note.is_arrival) last_late_ = note.rank;
  if (note.waited_ticks > 0) return count_wait(note.rank, note.waited_ticks);
  if (note.sent_bytes + note.received_bytes == 0) return running_.note_wait(note.rank, step);
  count_bytes(note.rank, note.sent_bytes, note.received_bytes);
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
