#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <iterator>
#include <system_error>
#include <tuple>
#include <utility>

#include "collectives/flight.h"
#include "host/process.h"
#include "host/threads.h"

namespace ringcomm::flight {
namespace {

// When a wait is said, in seconds since it began, and when the doctor is asked.
constexpr std::uint64_t kSaidAfter_s[] = {10, 60, 300};
constexpr std::size_t kDoctorAt = 2;  // of these
// A process that takes less of a core sleeps; as BUSY_PERCENT of ringcomm/measure/verdict.py.
constexpr double kBusyShare = 0.3;

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

bool is_message(const Event& event) {
  return event.op == OpKind::kSend || event.op == OpKind::kRecv;
}

bool is_over(const Event& event) { return event.end_ticks != 0 || event.on_device != 0; }

std::string call_text(const Event& event) {
  const std::string number = is_message(event) ? " with tag " + std::to_string(event.seq)
                                               : " #" + std::to_string(event.seq);
  return name_of(event.op) + number + " (" + size_text(event.num_bytes) + ")";
}

// The calls of a process, as far as it shows its recorder: of all groups, or of the group `id`.
std::vector<Event> calls_of(const PeerProcess& peer, std::optional<std::uint64_t> id = {}) {
  std::vector<Event> calls;
  const auto mapped = peer.flight();
  if (mapped == nullptr || mapped->num_bytes() < Memory::kNumBytes) return calls;
  const Memory memory(mapped->data());
  for (std::size_t i = 0; i < kNumEvents; ++i) {
    const std::optional<Event> event = read(memory.events()[i]);
    if (event && event->group < kNumGroups && (!id || memory.groups()[event->group].id == *id))
      calls.push_back(*event);
  }
  std::ranges::sort(calls, {}, &Event::number);
  return calls;
}

// ---- output

constinit PerProcess<std::atomic<bool>> is_blocked;
constinit PerProcess<std::atomic<const std::string*>> doctor;  // never freed

void ask_doctor(const std::string& command) {
  const char* arguments[] = {"sh", "-c", command.c_str(), nullptr};
  pid_t pid = -1;
  if (::posix_spawn(&pid, "/bin/sh", nullptr, nullptr, const_cast<char**>(arguments), environ) == 0)
    ::waitpid(pid, nullptr, 0);
}

// In a thread of its own: a write to a pipe that nobody reads blocks for ever, and the caller
// watches for deaths. Lines that come meanwhile are lost.
void write_aside(std::string text, const std::string* command) {
  std::atomic<bool>& is_busy = is_blocked.get();
  if (is_busy.exchange(true)) return;
  try {
    start_background_thread("ringcomm-says", [&is_busy, command, text = std::move(text)] {
      std::ignore = ::write(STDERR_FILENO, text.data(), text.size());
      is_busy = false;
      if (command != nullptr) ask_doctor(*command);
    }).detach();
  } catch (const std::system_error&) {  // no thread can start
    is_busy = false;
  }
}

}  // namespace

void set_doctor(const std::string& command) { doctor.get() = new std::string(command); }

void LongWaits::look(const Memory& memory, const std::set<Log*>& logs) {
  if (logs.empty()) return;
  const Clock clock(memory.header());
  std::map<std::uint64_t, Wait> still;
  std::string text;
  bool asks = false;
  for (std::size_t i = 0; i < kNumEvents; ++i) {
    const std::optional<Event> event = read(memory.events()[i]);
    if (!event || !event->is_waiting()) continue;
    const auto found = std::ranges::find(logs, event->group, &Log::place_);
    if (found == logs.end() || !(*found)->says_waits_) continue;
    Log& log = **found;
    const bool is_new = !waits_.contains(event->number);
    Wait& wait = still[event->number] = waits_[event->number];
    if (is_new) {
      wait.begin_ticks = is_message(*event) ? ticks() : event->begin_ticks;
      static_cast<void>(is_idle(log, *event, wait));  // counts from now on
    }
    const std::uint64_t waited_s = clock.seconds_since(wait.begin_ticks);
    const std::size_t num_due = static_cast<std::size_t>(
        std::ranges::upper_bound(kSaidAfter_s, waited_s) - std::begin(kSaidAfter_s));
    if (num_due <= wait.num_said) continue;
    const bool is_for_doctor = num_due >= kDoctorAt && wait.num_said < kDoctorAt;
    wait.num_said = num_due;
    const bool idle = is_idle(log, *event, wait);
    if (is_said_by_another(log, *event)) continue;
    if (is_for_doctor && !(idle && std::exchange(log.has_asked_idle_, true))) asks = true;
    if (idle && std::exchange(log.has_said_idle_, true)) continue;
    text += text_of(log, *event, wait, clock, idle);
  }
  waits_ = std::move(still);
  const std::string* command = asks ? doctor.get().load() : nullptr;
  if (command != nullptr || !text.empty()) write_aside(std::move(text), command);
}

// Whether the process that the call waits for is here, waits in no call, and has slept since this
// was asked before.
bool LongWaits::is_idle(const Log& log, const Event& event, Wait& wait) {
  if (event.waits_for < 0) return false;
  const PeerProcess& peer = *log.processes_[static_cast<std::size_t>(event.waits_for)];
  const std::uint64_t now_ns = monotonic_ns();
  const std::optional<std::uint64_t> cpu_ms = peer.cpu_ms();
  const std::optional<std::uint64_t> before_ms = std::exchange(wait.cpu_ms, cpu_ms);
  const std::uint64_t passed_ns = now_ns - std::exchange(wait.cpu_seen_ns, now_ns);
  if (!cpu_ms || !before_ms || peer.is_dead || peer.is_stopped()) return false;
  const double busy_ms = kBusyShare * static_cast<double>(passed_ns) / 1e6;
  if (static_cast<double>(*cpu_ms - *before_ms) >= busy_ms) return false;
  return peer.flight() != nullptr && std::ranges::none_of(calls_of(peer), &Event::is_waiting);
}

// Whether a rank of this machine before this one waits in the same collective: that one says it.
bool LongWaits::is_said_by_another(const Log& log, const Event& event) {
  const auto is_same = [&](const Event& other) {
    return other.op == event.op && other.seq == event.seq && other.is_waiting();
  };
  for (int rank = 0; rank < log.rank_ && !is_message(event); ++rank) {
    const PeerProcess& peer = *log.processes_[static_cast<std::size_t>(rank)];
    if (peer.is_dead || peer.is_stopped()) continue;
    if (std::ranges::any_of(calls_of(peer, log.id_), is_same)) return true;
  }
  return false;
}

std::string LongWaits::text_of(const Log& log, const Event& event, const Wait& wait,
                               const Clock& clock, bool is_idle) {
  std::string whom = "any rank", words;
  if (event.waits_for >= 0) {
    const PeerProcess& peer = *log.processes_[static_cast<std::size_t>(event.waits_for)];
    whom = "rank " + std::to_string(event.waits_for) + " (pid " + std::to_string(peer.pid) +
           " on " + peer.host;
    words = peer.last_words();
    if (!peer.bootstrap_address.empty())
      whom += peer.is_dead ? ", ended" : peer.is_stopped() ? ", stopped" : ", running";
    if (!words.empty()) whom += " after " + words;
    if (const std::vector<Event> calls = calls_of(peer, log.id_); !calls.empty()) {
      const Event& last = calls.back();
      const std::uint64_t since =
          clock.seconds_since(last.end_ticks != 0 ? last.end_ticks : last.begin_ticks);
      whom += (is_over(last) ? ", last call: " : ", in ") + call_text(last) + " " +
              std::to_string(since) + (is_over(last) ? " s ago" : " s");
    } else if (peer.flight() != nullptr) {
      whom += ", no call yet";
    }
    whom += ")";
  }
  const std::string waited = std::to_string(clock.seconds_since(wait.begin_ticks)) + " s";
  return "ringcomm rank " + std::to_string(log.rank_) + "/" +
         std::to_string(log.processes_.size()) + ": " +
         (is_idle && words.empty()
              ? "idle for " + waited + " in " + call_text(event) + ": " + whom +
                    " sleeps outside of calls, as a server does between requests (said once)"
              : call_text(event) + " waits for " + whom + " for " + waited) +
         "; `ringcomm doctor --job " + std::to_string(::getpid()) + "` shows all ranks\n";
}

}  // namespace ringcomm::flight
