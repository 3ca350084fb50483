#include <sched.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <iterator>
#include <utility>
#include <vector>

#include "collectives/recorder.h"
#include "host/process.h"
#include "host/threads.h"

namespace ringcomm::recorder {
namespace {

// When a wait is said, in seconds since it began, and when the doctor is asked.
constexpr std::uint64_t kSaidAfter_s[] = {10, 60, 300};
constexpr std::size_t kDoctorAt = 2;  // of these
// A process that takes less of a core sleeps; as BUSY_PERCENT of ringcomm/measure/verdict.py.
constexpr double kBusyShare = 0.3;

// ---- what the recorders of this process and of its peers have

bool is_over(const Event& event) { return event.end_ticks != 0 || event.kind == Kind::kEnqueued; }

// The calls of a process, as far as it shows its recorder: of all groups, or of the group `id`.
std::vector<Event> calls_of(const PeerProcess& peer, std::optional<std::uint64_t> id = {}) {
  std::vector<Event> calls;
  const auto mapped = peer.recorder();
  if (mapped == nullptr || mapped->num_bytes() < Memory::kNumBytes) return calls;
  const Memory memory(mapped->data());
  for (std::size_t place = 0; place < kNumEvents; ++place) {
    const std::optional<Event> event = read(memory.event(place));
    if (!event) continue;
    const GroupEntry& group = memory.group(event->group);
    if (!id || (group.id == *id && group.number == event->group)) calls.push_back(*event);
  }
  std::ranges::sort(calls, {}, &Event::number);
  return calls;
}

// Whether the process that the call waits for is here, waits in no call, and has slept since this
// was asked before.
bool is_idle(const RecordedGroup& group, const Event& event, LongWaits::Wait& wait) {
  if (event.waits_for < 0) return false;
  const PeerProcess& peer = *group.processes[static_cast<std::size_t>(event.waits_for)];
  const std::uint64_t now_ns = monotonic_ns();
  const std::optional<std::uint64_t> cpu_ms = peer.cpu_ms();
  const std::optional<std::uint64_t> before_ms = std::exchange(wait.cpu_ms, cpu_ms);
  const std::uint64_t passed_ns = now_ns - std::exchange(wait.cpu_seen_ns, now_ns);
  if (!cpu_ms || !before_ms || peer.is_dead || peer.is_stopped()) return false;
  const double busy_ms = kBusyShare * static_cast<double>(passed_ns) / 1e6;
  if (static_cast<double>(*cpu_ms - *before_ms) >= busy_ms) return false;
  return peer.recorder() != nullptr && std::ranges::none_of(calls_of(peer), &Event::is_waiting);
}

// Whether a rank of this machine before this one waits in the same collective: that one says it.
bool is_said_by_another(const RecordedGroup& group, const Event& event) {
  const auto is_same = [&](const Event& other) {
    return other.op == event.op && other.seq == event.seq && other.is_waiting();
  };
  for (int rank = 0; rank < group.rank && !event.is_message(); ++rank) {
    const PeerProcess& peer = *group.processes[static_cast<std::size_t>(rank)];
    if (peer.is_dead || peer.is_stopped()) continue;
    if (std::ranges::any_of(calls_of(peer, group.id), is_same)) return true;
  }
  return false;
}

// ---- words

std::uint64_t seconds_since(std::uint64_t then) {
  return static_cast<std::uint64_t>(std::max(0.0, ns_of(ticks() - then)) / 1e9);
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
  return std::string(name_of(event.op)) + (event.is_message() ? " with tag " : " #") +
         std::to_string(event.seq) + " (" + size_text(event.num_bytes) + ")";
}

// "rank 1 (pid 7 on host, running, last call: barrier #3 (0 bytes) 12 s ago)"
std::string peer_text(const RecordedGroup& group, int rank) {
  const PeerProcess& peer = *group.processes[static_cast<std::size_t>(rank)];
  std::string text =
      "rank " + std::to_string(rank) + " (pid " + std::to_string(peer.pid) + " on " + peer.host;
  if (!peer.bootstrap_address.empty())
    text += peer.is_dead ? ", ended" : peer.is_stopped() ? ", stopped" : ", running";
  if (const std::string words = peer.exit_reason(); !words.empty()) text += " after " + words;
  if (const std::vector<Event> calls = calls_of(peer, group.id); !calls.empty()) {
    const Event& last = calls.back();
    const std::uint64_t since = last.end_ticks != 0 ? last.end_ticks : last.begin_ticks;
    text += (is_over(last) ? ", last call: " : ", in ") + call_text(last) + " " +
            std::to_string(seconds_since(since)) + (is_over(last) ? " s ago" : " s");
  } else if (peer.recorder() != nullptr) {
    text += ", no call yet";
  }
  return text + ")";
}

std::string text_of(const RecordedGroup& group, const Event& event, std::uint64_t waited_s,
                    bool is_idle) {
  const bool is_any = event.waits_for < 0;
  const std::string whom = is_any ? "any rank" : peer_text(group, event.waits_for);
  const std::string waited = " for " + std::to_string(waited_s) + " s";
  // A process that has said why it ends does not sleep.
  const bool sleeps =
      is_idle && group.processes[static_cast<std::size_t>(event.waits_for)]->exit_reason().empty();
  return "ringcomm rank " + std::to_string(group.rank) + "/" +
         std::to_string(group.processes.size()) + ": " +
         (sleeps ? "idle" + waited + " in " + call_text(event) + ": " + whom +
                       " sleeps outside of calls, as a server does between requests (said once)"
                 : call_text(event) + " waits for " + whom + waited) +
         "; `ringcomm doctor --job " + std::to_string(::getpid()) + "` shows all ranks\n";
}

constinit PerProcess<std::atomic<const std::string*>> doctor;  // never freed

}  // namespace

void run_shell(const std::string& command) {
  const auto run = [](void* text) {
    const char* arguments[] = {"sh", "-c", static_cast<const char*>(text), nullptr};
    pid_t pid = -1;
    if (::posix_spawn(&pid, "/bin/sh", nullptr, nullptr, const_cast<char**>(arguments), environ) ==
        0)
      ::waitpid(pid, nullptr, 0);
    return 0;
  };
  std::vector<std::byte> stack(std::size_t{256} << 10);
  const pid_t pid = ::clone(run, stack.data() + stack.size(), CLONE_VM | CLONE_VFORK,
                            const_cast<char*>(command.c_str()));
  if (pid > 0) ::waitpid(pid, nullptr, __WCLONE);
}

void set_doctor(const std::string& command) { doctor.get() = new std::string(command); }

void LongWaits::look(const Memory& memory, const std::set<RecordedGroup*>& groups) {
  if (groups.empty()) return;
  std::map<std::uint64_t, Wait> still;
  std::string text;
  bool asks = false;
  for (std::size_t place = 0; place < kNumEvents; ++place) {
    const std::optional<Event> event = read(memory.event(place));
    if (!event || !event->is_waiting()) continue;
    const auto found = std::ranges::find(groups, event->group, &RecordedGroup::number);
    if (found == groups.end() || !(*found)->log_waits) continue;
    RecordedGroup& group = **found;
    const bool is_new = !waits_.contains(event->number);
    Wait& wait = still[event->number] = waits_[event->number];
    if (is_new) {
      wait.begin_ticks = event->is_message() ? ticks() : event->begin_ticks;
      static_cast<void>(is_idle(group, *event, wait));  // counts from now on
    }
    const std::uint64_t waited_s = seconds_since(wait.begin_ticks);
    const std::size_t num_due = static_cast<std::size_t>(
        std::ranges::upper_bound(kSaidAfter_s, waited_s) - std::begin(kSaidAfter_s));
    if (num_due <= wait.num_said) continue;
    const bool is_for_doctor = num_due >= kDoctorAt && wait.num_said < kDoctorAt;
    wait.num_said = num_due;
    const bool idle = is_idle(group, *event, wait);
    if (is_said_by_another(group, *event)) continue;
    if (is_for_doctor && !(idle && std::exchange(group.has_asked_idle, true))) asks = true;
    if (idle && std::exchange(group.has_said_idle, true)) continue;
    text += text_of(group, *event, waited_s, idle);
  }
  waits_ = std::move(still);
  const std::string* command = asks ? doctor.get().load() : nullptr;
  if (command != nullptr)
    say_aside(std::move(text), [command] { run_shell(*command); });
  else if (!text.empty())
    say_aside(std::move(text));
}

}  // namespace ringcomm::recorder
