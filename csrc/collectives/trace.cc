#include "collectives/trace.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <iomanip>
#include <sstream>
#include <utility>

#include "host/process.h"
#include "host/shared_memory.h"

namespace ringcomm::recorder {
namespace {

// How often the header gets a moment by both clocks, which costs some 200 ns.
constexpr double kMomentPause_ns = 1e8;

thread_local Within within;

std::string json_text(std::string text) {
  std::ranges::replace_if(text, [](unsigned char letter) { return letter < 0x20; }, ' ');
  std::ostringstream quoted;
  quoted << std::quoted(text);
  return quoted.str();
}

}  // namespace

/// The trace of a process. Never destroyed, because threads use it until they end.
class Trace {
 public:
  Trace(int events_fd, int log_fd, std::size_t num_events)
      : log_fd_(log_fd),
        num_events_(num_events),
        mapped_(events_fd, sizeof(TraceHeader) + num_events * sizeof(Event)) {
    std::memcpy(header().magic, TraceHeader::kMagic, sizeof header().magic);
  }

  /// Null where nothing is traced in this process. A forked child must not write to its parent's
  /// files.
  static Trace* find() {
    Trace* trace = active.load(std::memory_order_acquire);
    return trace != nullptr && trace->generation_ == process_generation() ? trace : nullptr;
  }

  Call add(const Event& event) {
    note_moment();
    auto* events = reinterpret_cast<Event*>(mapped_.data() + sizeof(TraceHeader));
    return put(events, num_events_, header().num_events, event);
  }

  /// Writes the moment by both clocks if it is due. The log of a killed process may end early, and
  /// a line through the moments of its first millisecond would be wrong by milliseconds an hour
  /// later. The last one also tells until when the process lived.
  void note_moment() {
    const std::uint64_t now_ticks = ticks();
    std::uint64_t due = due_ticks_.load(std::memory_order_relaxed);
    // One thread does: nothing is due until it has written.
    if (now_ticks < due ||
        !due_ticks_.compare_exchange_strong(due, ~std::uint64_t{0}, std::memory_order_acquire))
      return;
    const Anchor now = Anchor::now();
    Anchor& to = header().late[num_moments_++ % 2];
    __atomic_store_n(&to.ticks, std::uint64_t{0}, __ATOMIC_RELAXED);
    __atomic_store_n(&to.ns, now.ns, __ATOMIC_RELEASE);
    __atomic_store_n(&to.ticks, now.ticks, __ATOMIC_RELEASE);
    const double pause_ticks = kMomentPause_ns / ns_per_tick.load(std::memory_order_relaxed);
    due_ticks_.store(now.ticks + static_cast<std::uint64_t>(pause_ticks),
                     std::memory_order_release);
  }

  /// Writes a line of names and values, and when, with a single write, so that lines of several
  /// threads do not mix.
  void log(std::initializer_list<std::pair<const char*, std::string>> fields) const {
    const Anchor now = Anchor::now();
    std::string line =
        R"({"anchor": [)" + std::to_string(now.ticks) + ", " + std::to_string(now.ns) + "]";
    for (const auto& [name, value] : fields) line += ", " + json_text(name) + ": " + value;
    line += "}\n";
    // Nothing depends on it: a full disk costs the trace, not the job.
    [[maybe_unused]] const auto written = ::write(log_fd_, line.data(), line.size());
  }

 private:
  TraceHeader& header() const { return *reinterpret_cast<TraceHeader*>(mapped_.data()); }

  const int generation_ = process_generation();
  int log_fd_;
  std::size_t num_events_;
  host::SharedMemory mapped_;
  std::atomic<std::uint64_t> due_ticks_ = 0;
  std::size_t num_moments_ = 0;
};

void start_trace(int events_fd, int log_fd, std::size_t num_events) {
  if (Trace::find() != nullptr) return;
  active.store(new Trace(events_fd, log_fd, num_events), std::memory_order_release);
}

void trace_group(std::uint32_t group, const std::string& name, int rank,
                 const std::vector<std::uint64_t>& ranks, const std::string& transport) {
  const Trace* trace = Trace::find();
  if (trace == nullptr) return;
  std::string list;
  for (const std::uint64_t member : ranks)
    list += (list.empty() ? "" : ", ") + std::to_string(member);
  trace->log({{"group", std::to_string(group)},
              {"name", json_text(name)},
              {"rank", std::to_string(rank)},
              {"ranks", "[" + list + "]"},
              {"transport", json_text(transport)}});
}

void trace_leave(std::uint32_t group) {
  if (const Trace* trace = Trace::find()) trace->log({{"left", std::to_string(group)}});
}

void trace_failure(const std::string& why) {
  if (const Trace* trace = Trace::find()) trace->log({{"failure", json_text(why)}});
}

void trace_wait(const PeerEvent& wait) {
  if (!is_tracing() || wait.begin_ticks == 0) return;
  // By their begin; a signal handler may wait inside a wait.
  thread_local std::vector<std::pair<std::uint64_t, Call>> waits;
  if (waits.empty() || waits.back().first != wait.begin_ticks)
    waits.emplace_back(wait.begin_ticks, trace({.begin_ticks = wait.begin_ticks,
                                                .seq = within.seq,
                                                .group = within.group,
                                                .waits_for = rank16(wait.rank),
                                                .kind = Kind::kWait}));
  else if (Trace* trace = Trace::find())
    trace->note_moment();
  if (wait.end_ticks == 0) return;
  waits.back().second.end();
  waits.pop_back();
}

Call trace(const Event& event) {
  Trace* trace = Trace::find();
  return trace != nullptr ? trace->add(event) : Call{};
}

void Span::begin(Event event) {
  outer_ = within;
  if (event.group == 0) {
    event.group = within.group;
    event.seq = within.seq;
  }
  call_ = trace(event);
  if (call_.event != nullptr) within = {event.group, event.seq};
}

// In place, so that what a killed process was in is there without an end. An event that has been
// overwritten meanwhile is one of those that were dropped.
void Span::end() {
  call_.end();
  within = outer_;
}

}  // namespace ringcomm::recorder
