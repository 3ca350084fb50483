#include "collectives/trace.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <ctime>
#include <memory>
#include <mutex>

#include "transport/process.h"

namespace ringcomm::trace {
namespace {

// The file of events: a page with a FileHeader, then for each thread a page with a ThreadHeader and
// its ring buffer, in whole pages.
// Threads beyond these share the buffers of threads that have ended, or record nothing.
constexpr std::size_t kMaxThreads = 64;
constexpr std::size_t kMaxNames = 255;

struct FileHeader {
  std::array<char, 8> magic;
  std::uint64_t num_lost;  // events of threads without a buffer
};

struct ThreadHeader {
  std::uint64_t num_events;  // ever written; event n is at n modulo the capacity
  std::uint64_t alive_ns;
};

std::string json_text(const std::string& text) {
  std::string quoted = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') quoted += '\\';
    if (static_cast<unsigned char>(letter) >= 0x20) {
      quoted += letter;
    } else {
      std::array<char, 8> escaped;
      std::snprintf(escaped.data(), escaped.size(), "\\u%04x", static_cast<unsigned>(letter));
      quoted += escaped.data();
    }
  }
  return quoted + '"';
}

std::string field(const char* name, std::uint64_t value) {
  return json_text(name) + ": " + std::to_string(value);
}
std::string field(const char* name, const std::string& value) {
  return json_text(name) + ": " + json_text(value);
}

}  // namespace

/// The ring buffer of one thread.
class Buffer {
 public:
  Buffer(ThreadHeader* header, Event* events, std::size_t capacity)
      : header_(header), events_(events), capacity_(capacity) {}

  /// Writes an event; its number.
  std::uint64_t write(const Event& event) {
    const std::uint64_t number = header_->num_events;
    events_[number % capacity_] = event;
    // Stored after the event, so that a reader sees complete events only, also in the file of a
    // killed or running process.
    __atomic_store_n(&header_->num_events, number + 1, __ATOMIC_RELEASE);
    return number;
  }
  /// The event of that number; null where it has been overwritten.
  Event* find(std::uint64_t number) {
    return header_->num_events - number <= capacity_ ? &events_[number % capacity_] : nullptr;
  }
  void note_alive(std::uint64_t time_ns) {
    __atomic_store_n(&header_->alive_ns, time_ns, __ATOMIC_RELAXED);
  }

  // The innermost collective of this thread.
  std::uint64_t seq = kNoSeq;
  std::uint32_t group = kNoGroup;

 private:
  ThreadHeader* header_;
  Event* events_;
  std::size_t capacity_;
};

/// The recording of a process. Never destroyed, because threads use it until they end.
class Recorder {
 public:
  Recorder(int events_fd, int log_fd, std::size_t num_events)
      : events_fd_(events_fd),
        log_fd_(log_fd),
        num_events_(num_events),
        thread_bytes_(page_bytes() + whole_pages(num_events * sizeof(Event))) {
    header_ = static_cast<FileHeader*>(map(0, page_bytes()));
    if (header_ != nullptr) header_->magic = {'R', 'I', 'N', 'G', 'T', 'R', 'C', '1'};
  }

  /// False in a forked child, which must not write to its parent's files.
  bool is_mine() const { return generation_ == process_generation(); }

  /// A buffer for the calling thread, or null: no memory, or too many threads.
  Buffer* take_buffer() {
    const std::lock_guard lock(mutex_);
    std::size_t number = buffers_.size();
    if (!free_.empty()) {
      number = free_.back();
      free_.pop_back();
    } else if (number >= kMaxThreads || !add_buffer()) {
      return nullptr;
    }
    std::array<char, 16> name{};
    ::pthread_getname_np(::pthread_self(), name.data(), name.size());
    log(field("thread", number) + ", " + field("name", name.data()) + ", " +
        field("tid", static_cast<std::uint64_t>(::syscall(SYS_gettid))));
    return buffers_[number].get();
  }
  /// Its thread has ended. Its events remain, and another thread may append to them.
  void give_back(const Buffer* buffer) {
    const std::lock_guard lock(mutex_);
    for (std::size_t number = 0; number < buffers_.size(); ++number)
      if (buffers_[number].get() == buffer) free_.push_back(number);
  }
  void count_lost() {
    if (header_ != nullptr) __atomic_fetch_add(&header_->num_lost, 1, __ATOMIC_RELAXED);
  }

  /// Writes one line with a single write, so that lines of several threads do not mix.
  void log(const std::string& fields) const {
    const std::string line = "{" + fields + "}\n";
    // Nothing depends on it: a full disk costs the trace, not the job.
    [[maybe_unused]] const auto written = ::write(log_fd_, line.data(), line.size());
  }

  std::uint8_t name_number(const char* literal) {
    if (const std::uint8_t number = find_name(literal); number != 0) return number;
    const std::lock_guard lock(mutex_);
    if (const std::uint8_t number = find_name(literal); number != 0) return number;
    const std::size_t count = num_names_.load(std::memory_order_relaxed);
    if (count == kMaxNames) return 0;
    // Logged before any event can use the number, so that a reader of the events and then the log
    // finds it.
    log(field("label", count + 1) + ", " + field("text", literal));
    names_[count] = literal;
    num_names_.store(count + 1, std::memory_order_release);
    return static_cast<std::uint8_t>(count + 1);
  }
  std::uint32_t next_group() { return num_groups_.fetch_add(1); }

 private:
  void* map(std::size_t offset, std::size_t num_bytes) const {
    const auto place = static_cast<off_t>(offset);
    // Allocated beforehand: a write to a mapped hole of a full disk would kill the process.
    if (::posix_fallocate(events_fd_, place, static_cast<off_t>(num_bytes)) != 0) return nullptr;
    void* data = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, events_fd_, place);
    return data != MAP_FAILED ? data : nullptr;
  }

  // 0 while it has no number.
  std::uint8_t find_name(const char* literal) const {
    const std::size_t count = num_names_.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < count; ++i)
      if (names_[i] == literal) return static_cast<std::uint8_t>(i + 1);
    return 0;
  }

  bool add_buffer() {
    void* data = map(page_bytes() + buffers_.size() * thread_bytes_, thread_bytes_);
    if (data == nullptr) return false;
    auto* events = reinterpret_cast<Event*>(static_cast<std::byte*>(data) + page_bytes());
    buffers_.push_back(
        std::make_unique<Buffer>(static_cast<ThreadHeader*>(data), events, num_events_));
    return true;
  }

  const int generation_ = process_generation();
  int events_fd_;
  int log_fd_;
  std::size_t num_events_;
  std::size_t thread_bytes_;
  FileHeader* header_ = nullptr;
  std::array<const char*, kMaxNames> names_ = {};
  std::atomic<std::size_t> num_names_ = 0;  // those below it do not change any more
  std::atomic<std::uint32_t> num_groups_ = 0;
  std::mutex mutex_;  // guards the buffers, and new names
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<std::size_t> free_;
};

namespace {

// A thread's buffer, from its first event to its end.
struct ThreadBuffer {
  Recorder* recorder = nullptr;
  Buffer* buffer = nullptr;

  ~ThreadBuffer() {
    if (buffer != nullptr && recorder->is_mine()) recorder->give_back(buffer);
  }
};

// Null where nothing is recorded in this process.
Recorder* find_recorder() {
  Recorder* recorder = active.load(std::memory_order_acquire);
  return recorder != nullptr && recorder->is_mine() ? recorder : nullptr;
}

// Null where this thread has none.
Buffer* find_buffer() {
  Recorder* recorder = find_recorder();
  if (recorder == nullptr) return nullptr;
  thread_local ThreadBuffer mine;
  if (mine.recorder != recorder) {
    mine.recorder = recorder;
    mine.buffer = recorder->take_buffer();
  }
  if (mine.buffer == nullptr) recorder->count_lost();
  return mine.buffer;
}

}  // namespace

void start(int events_fd, int log_fd, std::size_t num_events) {
  if (find_recorder() != nullptr) return;
  active.store(new Recorder(events_fd, log_fd, num_events), std::memory_order_release);
}

void end() {
  if (const Recorder* recorder = find_recorder(); recorder != nullptr)
    recorder->log(field("end_ns", now_ns()));
}

std::uint32_t add_group(const std::string& name, int rank, const std::vector<std::uint64_t>& ranks,
                        const std::string& transport) {
  Recorder* recorder = find_recorder();
  if (recorder == nullptr) return kNoGroup;
  const std::uint32_t group = recorder->next_group();
  std::string list;
  for (const std::uint64_t member : ranks)
    list += (list.empty() ? "" : ", ") + std::to_string(member);
  recorder->log(field("group", group) + ", " + field("name", name) + ", " +
                field("rank", static_cast<std::uint64_t>(rank)) + ", \"ranks\": [" + list + "], " +
                field("transport", transport) + ", " + field("time_ns", now_ns()));
  return group;
}

void leave_group(std::uint32_t group) {
  if (group == kNoGroup) return;
  if (const Recorder* recorder = find_recorder(); recorder != nullptr)
    recorder->log(field("left", group));
}

void add_failure(const std::exception_ptr& error) {
  const Recorder* recorder = find_recorder();
  if (recorder == nullptr) return;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& what) {
    recorder->log(field("failure", what.what()) + ", " + field("time_ns", now_ns()));
  }
}

void note_alive() {
  if (!is_on()) return;
  if (Buffer* buffer = find_buffer(); buffer != nullptr) buffer->note_alive(now_ns());
}

std::uint8_t name_number(const char* literal) {
  Recorder* recorder = find_recorder();
  return recorder != nullptr ? recorder->name_number(literal) : std::uint8_t{0};
}

std::uint64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

Event event_of(const RingStep& step) {
  return {.num_bytes = step.num_bytes,
          .to = step.to,
          .from = step.from,
          .chunk = step.chunk,
          .slice = static_cast<std::uint32_t>(step.slice),
          .step = static_cast<std::int16_t>(step.step),
          .kind = Kind::kStep,
          .name = name_number(step.phase)};
}

void add(const Event& event) {
  if (Buffer* buffer = find_buffer(); buffer != nullptr) buffer->write(event);
}

void Span::begin(Event event) {
  buffer_ = find_buffer();
  if (buffer_ == nullptr) return;
  outer_seq_ = buffer_->seq;
  outer_group_ = buffer_->group;
  if (event.group == kNoGroup) {
    event.group = buffer_->group;
    event.seq = buffer_->seq;
  } else {
    buffer_->group = event.group;
    buffer_->seq = event.seq;
  }
  if (event.begin_ns == 0) event.begin_ns = now_ns();
  number_ = buffer_->write(event);
}

// In place, so that what a killed process was in is there without an end. An event that has been
// overwritten meanwhile is one of those that were dropped.
void Span::end() {
  if (Event* event = buffer_->find(number_); event != nullptr)
    __atomic_store_n(&event->end_ns, now_ns(), __ATOMIC_RELAXED);
  buffer_->seq = outer_seq_;
  buffer_->group = outer_group_;
}

void Span::change_algorithm(const char* literal) {
  if (Event* event = buffer_->find(number_); event != nullptr)
    event->algorithm = trace::name_number(literal);
}

}  // namespace ringcomm::trace
