#include "collectives/trace.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <initializer_list>
#include <iomanip>
#include <mutex>
#include <sstream>
#include <utility>

#include "host/process.h"

namespace ringcomm::trace {
namespace {

// The file of events: a page with a FileHeader, then for each thread a page with a ThreadHeader and
// its ring buffer, in whole pages.
// Threads beyond these share the buffers of threads that have ended, or record nothing.
constexpr std::size_t kMaxThreads = 64;
constexpr std::size_t kMaxNames = 255;

std::string json_text(std::string text) {
  std::ranges::replace_if(text, [](unsigned char letter) { return letter < 0x20; }, ' ');
  std::ostringstream quoted;
  quoted << std::quoted(text);
  return quoted.str();
}

}  // namespace

struct FileHeader {
  std::array<char, 8> magic;
  std::uint64_t num_lost;  // events of threads without a buffer
};

struct ThreadHeader {
  std::uint64_t num_events;  // ever written; event n is at n modulo the capacity
  std::uint64_t alive_ns;
};

/// The ring buffer of one thread.
struct Buffer {
  /// Writes an event; its number.
  std::uint64_t write(const Event& event) {
    const std::uint64_t number = header->num_events;
    events[number % capacity] = event;
    // Stored after the event, so that a reader sees complete events only, also in the file of a
    // killed or running process.
    __atomic_store_n(&header->num_events, number + 1, __ATOMIC_RELEASE);
    return number;
  }
  /// The event of that number; null where it has been overwritten.
  Event* find(std::uint64_t number) const {
    return header->num_events - number <= capacity ? &events[number % capacity] : nullptr;
  }

  std::uint64_t number;  // of the buffer
  ThreadHeader* header;
  Event* events;
  std::size_t capacity;
  // The innermost collective of this thread.
  std::uint64_t seq = kNoSeq;
  std::uint32_t group = kNoGroup;
};

/// The recording of a process. Neither it nor a Buffer is ever destroyed, because threads use them
/// until they end.
class Recorder {
 public:
  Recorder(int events_fd, int log_fd, std::size_t num_events)
      : events_fd_(events_fd),
        log_fd_(log_fd),
        num_events_(num_events),
        thread_bytes_(page_bytes() + whole_pages(num_events * sizeof(Event))) {
    header_ = reinterpret_cast<FileHeader*>(map(0, page_bytes()));
    if (header_ != nullptr) header_->magic = {'R', 'I', 'N', 'G', 'T', 'R', 'C', '1'};
  }

  /// Null where nothing is recorded in this process. A forked child must not write to its parent's
  /// files.
  static Recorder* find() {
    Recorder* recorder = active.load(std::memory_order_acquire);
    return recorder != nullptr && recorder->generation_ == process_generation() ? recorder
                                                                                : nullptr;
  }

  /// That of the calling thread, from its first event to its end. Null where it has none.
  static Buffer* find_buffer() {
    struct Mine {
      Recorder* recorder = nullptr;
      Buffer* buffer = nullptr;
      // Its events remain, and another thread may append to them.
      ~Mine() {
        if (buffer == nullptr || Recorder::find() != recorder) return;
        const std::lock_guard lock(recorder->mutex_);
        recorder->free_.push_back(buffer);
      }
    };
    thread_local Mine mine;
    Recorder* recorder = find();
    if (recorder == nullptr) return nullptr;
    if (mine.recorder != recorder) {
      mine.recorder = recorder;
      mine.buffer = recorder->take_buffer();
    }
    if (mine.buffer == nullptr && recorder->header_ != nullptr)
      __atomic_fetch_add(&recorder->header_->num_lost, 1, __ATOMIC_RELAXED);
    return mine.buffer;
  }

  /// Writes a line of names and values with a single write, so that lines of several threads do not
  /// mix.
  void log(std::initializer_list<std::pair<const char*, std::string>> fields) const {
    std::string line;
    for (const auto& [name, value] : fields)
      line += (line.empty() ? "{" : ", ") + json_text(name) + ": " + value;
    line += "}\n";
    // Nothing depends on it: a full disk costs the trace, not the job.
    [[maybe_unused]] const auto written = ::write(log_fd_, line.data(), line.size());
  }

  std::uint8_t name_number(const char* literal) {
    std::size_t idx = 0;
    const auto is_known = [&] {  // looks on from idx
      const std::size_t count = num_names_.load(std::memory_order_acquire);
      while (idx < count && names_[idx] != literal) ++idx;
      return idx < count;
    };
    if (is_known()) return static_cast<std::uint8_t>(idx + 1);
    const std::lock_guard lock(mutex_);
    if (!is_known()) {
      if (idx == kMaxNames) return 0;
      // Logged before any event can use the number, so that a reader of the events and then the log
      // finds it.
      log({{"label", std::to_string(idx + 1)}, {"text", json_text(literal)}});
      names_[idx] = literal;
      num_names_.store(idx + 1, std::memory_order_release);
    }
    return static_cast<std::uint8_t>(idx + 1);
  }

  std::atomic<std::uint32_t> num_groups = 0;

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
  Buffer* take_buffer() {
    const std::lock_guard lock(mutex_);
    Buffer* buffer = nullptr;
    if (!free_.empty()) {
      buffer = free_.back();
      free_.pop_back();
    } else {
      if (num_buffers_ == kMaxThreads) return nullptr;
      std::byte* data = map(page_bytes() + num_buffers_ * thread_bytes_, thread_bytes_);
      if (data == nullptr) return nullptr;
      buffer = new Buffer{.number = num_buffers_++,
                          .header = reinterpret_cast<ThreadHeader*>(data),
                          .events = reinterpret_cast<Event*>(data + page_bytes()),
                          .capacity = num_events_};
    }
    std::array<char, 16> name{};
    ::pthread_getname_np(::pthread_self(), name.data(), name.size());
    log({{"thread", std::to_string(buffer->number)}, {"name", json_text(name.data())}});
    return buffer;
  }

  const int generation_ = process_generation();
  int events_fd_;
  int log_fd_;
  std::size_t num_events_;
  std::size_t thread_bytes_;
  FileHeader* header_ = nullptr;
  std::array<const char*, kMaxNames> names_ = {};
  std::atomic<std::size_t> num_names_ = 0;  // those below it do not change any more
  std::mutex mutex_;                        // guards the buffers, and new names
  std::size_t num_buffers_ = 0;
  std::vector<Buffer*> free_;
};

void start(int events_fd, int log_fd, std::size_t num_events) {
  if (Recorder::find() != nullptr) return;
  active.store(new Recorder(events_fd, log_fd, num_events), std::memory_order_release);
}

std::uint32_t add_group(const std::string& name, int rank, const std::vector<std::uint64_t>& ranks,
                        const std::string& transport) {
  Recorder* recorder = Recorder::find();
  if (recorder == nullptr) return kNoGroup;
  const std::uint32_t group = recorder->num_groups.fetch_add(1);
  std::string list;
  for (const std::uint64_t member : ranks)
    list += (list.empty() ? "" : ", ") + std::to_string(member);
  recorder->log({{"group", std::to_string(group)},
                 {"name", json_text(name)},
                 {"rank", std::to_string(rank)},
                 {"ranks", "[" + list + "]"},
                 {"transport", json_text(transport)}});
  return group;
}

void leave_group(std::uint32_t group) {
  if (const Recorder* recorder = Recorder::find(); recorder != nullptr && group != kNoGroup)
    recorder->log({{"left", std::to_string(group)}});
}

void add_failure(const std::string& why) {
  if (const Recorder* recorder = Recorder::find())
    recorder->log({{"failure", json_text(why)}, {"time_ns", std::to_string(now_ns())}});
}

void record_alive() {
  if (!is_on()) return;
  if (const Buffer* buffer = Recorder::find_buffer())
    __atomic_store_n(&buffer->header->alive_ns, now_ns(), __ATOMIC_RELAXED);
}

std::uint8_t name_number(const char* literal) {
  Recorder* recorder = Recorder::find();
  return recorder != nullptr ? recorder->name_number(literal) : std::uint8_t{0};
}

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

void add(const Event& event) {
  if (Buffer* buffer = Recorder::find_buffer()) buffer->write(event);
}

void Span::begin(Event event) {
  buffer_ = Recorder::find_buffer();
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
  if (Event* event = buffer_->find(number_))
    __atomic_store_n(&event->end_ns, now_ns(), __ATOMIC_RELAXED);
  buffer_->seq = outer_seq_;
  buffer_->group = outer_group_;
}

void Span::change_algorithm(const char* literal) {
  if (Event* event = buffer_->find(number_)) event->algorithm = trace::name_number(literal);
}

}  // namespace ringcomm::trace
