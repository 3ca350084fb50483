#include "host/process.h"

#include <poll.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>
#include <vector>

namespace ringcomm {
namespace {

std::atomic<int> generation = 0;

using Body = std::function<void()>;

void* run_body(void* body) {
  const std::unique_ptr<Body> owned(static_cast<Body*>(body));
  (*owned)();
  return nullptr;
}

int create_thread(::pthread_t& thread, std::size_t stack_bytes, Body* body) {
  ::pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  if (stack_bytes > 0) ::pthread_attr_setstacksize(&attributes, stack_bytes);
  const int error = ::pthread_create(&thread, &attributes, run_body, body);
  ::pthread_attr_destroy(&attributes);
  return error;
}

using std::filesystem::path;

// What version 1 has for "no limit" of memory is the largest number of whole pages.
constexpr double kNoBytes = 1e18;

// The numbers of a file from its beginning on; none where it has a word, as "max".
std::vector<double> numbers_in(const path& file) {
  std::ifstream text(file);
  return {std::istream_iterator<double>(text), {}};
}

void lower(std::optional<CgroupLimits::Limit>& limit, double value, const path& file) {
  if (!limit || value < limit->value) limit = CgroupLimits::Limit{value, file.string()};
}

void read_folder(const path& folder, CgroupLimits& limits) {
  if (const auto cpu = numbers_in(folder / "cpu.max"); cpu.size() == 2 && cpu[1] > 0)
    lower(limits.cpu_cores, cpu[0] / cpu[1], folder / "cpu.max");
  const auto quota = numbers_in(folder / "cpu.cfs_quota_us");
  const auto period = numbers_in(folder / "cpu.cfs_period_us");
  if (!quota.empty() && quota[0] > 0 && !period.empty() && period[0] > 0)
    lower(limits.cpu_cores, quota[0] / period[0], folder / "cpu.cfs_quota_us");
  for (const char* name : {"memory.max", "memory.limit_in_bytes"})
    if (const auto bytes = numbers_in(folder / name); !bytes.empty() && bytes[0] < kNoBytes)
      lower(limits.memory_bytes, bytes[0], folder / name);
}

// A container may see its own cgroup at the root and its name on the host: folders that are not
// there are skipped.
void read_ancestors(path folder, const path& cgroup, CgroupLimits& limits) {
  read_folder(folder, limits);
  for (const path& name : cgroup.relative_path()) read_folder(folder /= name, limits);
}

}  // namespace

int process_generation() {
  // A load instead of a system call, because every collective calls it.
  [[maybe_unused]] static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });
  return generation.load(std::memory_order_relaxed);
}

BackgroundThread start_background_thread(const char* name, std::function<void()> body,
                                         std::size_t stack_bytes) {
  auto owned = std::make_unique<Body>(std::move(body));
  sigset_t all, previous;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &previous);  // the thread inherits it
  ::pthread_t thread{};
  int error = create_thread(thread, stack_bytes, owned.get());
  // Thread-local variables of the program's libraries are part of the stack, and may fill a small
  // one.
  if (error == EINVAL) error = create_thread(thread, kDefaultStackBytes, owned.get());
  ::pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  if (error != 0)
    throw std::system_error(error, std::generic_category(),
                            std::string("ringcomm: the thread ") + name +
                                " could not be started; check the limits of threads (ulimit -u, "
                                "pids.max of the cgroup) and of memory");
  owned.release();
  ::pthread_setname_np(thread, name);
  return BackgroundThread(thread);
}

WatchThread::WatchThread(const char* name, Pace pace, std::function<bool()> look)
    : pace_(pace), look_(std::move(look)) {
  thread_ = start_background_thread(name, [this] { run(); });
}

WatchThread::~WatchThread() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void WatchThread::look_for(std::int64_t num_looks) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(looks_left_, std::max(looks_left_, num_looks)) == 0) changed_.notify_all();
}

void WatchThread::run() {
  std::unique_lock lock(mutex_);
  for (bool goes_on = true; goes_on; lock.lock()) {
    changed_.wait(lock, [this] { return is_over_ || looks_left_ > 0; });
    if (changed_.wait_for(lock, pace_.interval, [this] { return is_over_; })) return;
    --looks_left_;
    lock.unlock();
    goes_on = look_();
  }
}

namespace {

// How often a reader tells that the process runs.
constexpr std::chrono::milliseconds kSeenInterval{10};

struct Running {
  using Clock = std::chrono::steady_clock;
  std::mutex mutex;
  std::atomic<Clock::duration> stopped = Clock::duration::zero();
  std::atomic<Clock::time_point> seen = Clock::now();  // written after `stopped`
};
constinit PerProcess<Running> running;

}  // namespace

RunningClock::time_point RunningClock::now() {
  Running& process = running.get();
  const auto now = Running::Clock::now();
  if (now - process.seen.load(std::memory_order_acquire) > kSeenInterval) {
    const std::lock_guard lock(process.mutex);
    const auto unseen = now - process.seen.load();
    if (unseen > kLongestStop)
      process.stopped.store(process.stopped.load() + unseen - kLongestStop);
    if (unseen > duration::zero()) process.seen.store(now, std::memory_order_release);
  }
  return time_point(now.time_since_epoch() - process.stopped.load(std::memory_order_relaxed));
}

void say_line(const std::string& line) noexcept {
  pollfd entry{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
  if (::poll(&entry, 1, 0) <= 0 || (entry.revents & POLLOUT) == 0) return;
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

CgroupLimits read_cgroup_limits(const std::string& proc, const std::string& cgroups) {
  CgroupLimits limits;
  read_folder(cgroups, limits);
  std::ifstream lines(path(proc) / "cgroup");
  for (std::string line; std::getline(lines, line);) {  // "number:controllers:cgroup"
    std::istringstream fields(line);
    std::string number, controllers, cgroup;
    std::getline(fields, number, ':');
    std::getline(fields, controllers, ':');
    std::getline(fields, cgroup);
    if (controllers.empty()) read_ancestors(cgroups, cgroup, limits);
    std::istringstream names(controllers);
    for (std::string name; std::getline(names, name, ',');)
      if (name == "cpu" || name == "memory") read_ancestors(path(cgroups) / name, cgroup, limits);
  }
  return limits;
}

const CgroupLimits& cgroup_limits() {
  static const CgroupLimits limits = read_cgroup_limits("/proc/self", "/sys/fs/cgroup");
  return limits;
}

}  // namespace ringcomm
