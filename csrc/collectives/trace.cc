#include "collectives/trace.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <initializer_list>
#include <iomanip>
#include <mutex>
#include <sstream>
#include <utility>

#include "host/process.h"

namespace ringcomm::recorder {
namespace {

std::string json_text(std::string text) {
  std::ranges::replace_if(text, [](unsigned char letter) { return letter < 0x20; }, ' ');
  std::ostringstream quoted;
  quoted << std::quoted(text);
  return quoted.str();
}

}  // namespace

/// The moments by both clocks in the header. The log of a killed process may end early, and a line
/// through the moments of its first millisecond would be wrong by milliseconds an hour later.
class LateMoments {
 public:
  explicit LateMoments(TraceHeader* header) : header_(header) {}

  /// Writes one if it is due: once a second, and earlier each time that the recording has doubled.
  void look(std::uint64_t now_ticks) {
    std::uint64_t due = due_ticks_.load(std::memory_order_relaxed);
    if (now_ticks < due) return;
    // One thread does: nothing is due until it has written.
    if (due_ticks_.compare_exchange_strong(due, ~std::uint64_t{0}, std::memory_order_acquire))
      write();
  }

 private:
  void write() {
    const Anchor now = Anchor::now();
    Anchor& to = header_->late[num_written_++ % 2];
    __atomic_store_n(&to.ticks, std::uint64_t{0}, __ATOMIC_RELAXED);
    __atomic_store_n(&to.ns, now.ns, __ATOMIC_RELEASE);
    __atomic_store_n(&to.ticks, now.ticks, __ATOMIC_RELEASE);
    const auto passed_ticks = static_cast<double>(now.ticks - start_.ticks);
    const auto passed_ns = static_cast<double>(now.ns - start_.ns);
    const double pause_ticks = passed_ticks * std::min(1.0, kPause_ns / std::max(1.0, passed_ns));
    due_ticks_.store(now.ticks + static_cast<std::uint64_t>(pause_ticks),
                     std::memory_order_release);
  }

  static constexpr double kPause_ns = 1e9;

  TraceHeader* header_;
  const Anchor start_ = Anchor::now();
  std::atomic<std::uint64_t> due_ticks_ = start_.ticks;
  std::size_t num_written_ = 0;
};

/// The ring of one thread, and the innermost collective of the thread.
struct ThreadRing {
  /// Stored before its number, so that a reader sees complete events only, also in the file of a
  /// killed or running process.
  Call add(Event& event) {
    event.number = ++num_events;
    const std::uint64_t now = ticks();
    late->look(now);
    if (event.begin_ticks == 0) event.begin_ticks = now;
    write(events[event.number % capacity], event);
    return {&events[event.number % capacity], event.number};
  }

  void look_around() const {
    const std::uint64_t now = ticks();
    late->look(now);
    __atomic_store_n(alive_ticks, now, __ATOMIC_RELAXED);
  }

  LateMoments* late;
  std::size_t idx;
  std::uint64_t* alive_ticks;
  Event* events;
  std::size_t capacity;
  std::uint64_t num_events = 0;
  std::uint64_t seq = kNoSeq;
  std::uint32_t group = 0;
  Call wait = {};
  std::uint64_t wait_ticks = 0;  // its begin
};

/// The trace of a process. Neither it nor a ThreadRing is ever destroyed, because threads use them
/// until they end.
class Trace {
 public:
  Trace(int events_fd, int log_fd, std::size_t num_events)
      : events_fd_(events_fd),
        log_fd_(log_fd),
        num_events_(num_events),
        ring_bytes_(whole_pages(num_events * sizeof(Event))),
        header_(reinterpret_cast<TraceHeader*>(map(0, page_bytes()))),
        late_(header_) {
    if (header_ != nullptr) std::memcpy(header_->magic, TraceHeader::kMagic, sizeof header_->magic);
  }

  /// Null where nothing is traced in this process. A forked child must not write to its parent's
  /// files.
  static Trace* find() {
    Trace* trace = active.load(std::memory_order_acquire);
    return trace != nullptr && trace->generation_ == process_generation() ? trace : nullptr;
  }

  /// That of the calling thread, from its first event to its end. Null where it has none.
  static ThreadRing* find_ring() {
    struct Mine {
      Trace* trace = nullptr;
      ThreadRing* ring = nullptr;
      // Its events remain, and another thread may append to them.
      ~Mine() {
        if (ring == nullptr || Trace::find() != trace) return;
        const std::lock_guard lock(trace->mutex_);
        trace->free_.push_back(ring);
      }
    };
    thread_local Mine mine;
    Trace* trace = find();
    if (trace == nullptr) return nullptr;
    if (mine.trace != trace) {
      mine.trace = trace;
      mine.ring = trace->take_ring();
    }
    if (mine.ring == nullptr && trace->header_ != nullptr)
      __atomic_fetch_add(&trace->header_->num_lost, 1, __ATOMIC_RELAXED);
    return mine.ring;
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
  // Null where there is no memory.
  std::byte* map(std::size_t offset, std::size_t num_bytes) const {
    const auto place = static_cast<off_t>(offset);
    // Allocated beforehand: a write to a mapped hole of a full disk would kill the process.
    if (::posix_fallocate(events_fd_, place, static_cast<off_t>(num_bytes)) != 0) return nullptr;
    void* data = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, events_fd_, place);
    return data != MAP_FAILED ? static_cast<std::byte*>(data) : nullptr;
  }

  // Null where there is no memory, and of too many threads.
  ThreadRing* take_ring() {
    const std::lock_guard lock(mutex_);
    ThreadRing* ring = nullptr;
    if (!free_.empty()) {
      ring = free_.back();
      free_.pop_back();
    } else {
      if (num_rings_ == kMaxThreads || header_ == nullptr) return nullptr;
      std::byte* data = map(page_bytes() + num_rings_ * ring_bytes_, ring_bytes_);
      if (data == nullptr) return nullptr;
      ring = new ThreadRing{.late = &late_,
                            .idx = num_rings_,
                            .alive_ticks = &header_->alive_ticks[num_rings_++],
                            .events = reinterpret_cast<Event*>(data),
                            .capacity = num_events_};
    }
    std::array<char, 16> name{};
    ::pthread_getname_np(::pthread_self(), name.data(), name.size());
    log({{"thread", std::to_string(ring->idx)}, {"name", json_text(name.data())}});
    return ring;
  }

  const int generation_ = process_generation();
  int events_fd_;
  int log_fd_;
  std::size_t num_events_;
  std::size_t ring_bytes_;
  TraceHeader* header_;  // null where there is no memory, and then there are no rings
  LateMoments late_;
  std::mutex mutex_;  // guards the rings
  std::size_t num_rings_ = 0;
  std::vector<ThreadRing*> free_;
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
  ThreadRing* ring = Trace::find_ring();
  if (ring == nullptr) return;
  if (std::exchange(ring->wait_ticks, wait.begin_ticks) != wait.begin_ticks) {
    Event event{.begin_ticks = wait.begin_ticks,
                .seq = ring->seq,
                .group = ring->group,
                .waits_for = rank16(wait.rank),
                .kind = Kind::kWait};
    ring->wait = ring->add(event);
  } else if (wait.end_ticks == 0) {
    ring->look_around();
  }
  if (wait.end_ticks != 0) ring->wait.end();
}

Call trace(Event event) {
  ThreadRing* ring = Trace::find_ring();
  return ring != nullptr ? ring->add(event) : Call{};
}

void Span::begin(Event event) {
  ring_ = Trace::find_ring();
  if (ring_ == nullptr) return;
  outer_seq_ = ring_->seq;
  outer_group_ = ring_->group;
  if (event.group == 0) {
    event.group = ring_->group;
    event.seq = ring_->seq;
  } else {
    ring_->group = event.group;
    ring_->seq = event.seq;
  }
  call_ = ring_->add(event);
}

// In place, so that what a killed process was in is there without an end. An event that has been
// overwritten meanwhile is one of those that were dropped.
void Span::end() {
  call_.end();
  ring_->seq = outer_seq_;
  ring_->group = outer_group_;
}

}  // namespace ringcomm::recorder
