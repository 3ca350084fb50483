#include "ptx/machine.h"

#include <sched.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

// Saves the registers that a function must keep, and continues where the other fiber stopped.
#if !defined(__x86_64__)
#error "the fibers of tests/ptx are written for x86-64"
#endif
__asm__(R"(
.text
.globl ringcomm_ptx_switch
.hidden ringcomm_ptx_switch
.type ringcomm_ptx_switch,@function
ringcomm_ptx_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size ringcomm_ptx_switch, .-ringcomm_ptx_switch
)");
extern "C" void ringcomm_ptx_switch(void** from, void* to);

namespace ringcomm::ptx {
namespace {

// Registers of a kernel are locals of its function: at most some 16 KiB (Makefile:
// -Wframe-larger-than).
constexpr std::size_t kStackBytes = 64 << 10;
constexpr std::size_t kMaxBlockThreads = 1024;
// Beside busy processes a yield loses a whole slice of the scheduler, a sleep does not.
constexpr u32 kPollsPerSleep = 2;

thread_local Block* current = nullptr;

/// Stacks for a block's fibers, kept for the next block.
class Stacks {
 public:
  Stacks() {
    const std::lock_guard lock(mutex());
    if (!free().empty()) {
      memory_ = free().back();
      free().pop_back();
      return;
    }
    void* const mapped = mmap(nullptr, kStackBytes * kMaxBlockThreads, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
      std::perror("ptx: mmap of stacks");
      std::abort();
    }
    memory_ = static_cast<std::byte*>(mapped);
  }
  ~Stacks() {
    const std::lock_guard lock(mutex());
    free().push_back(memory_);
  }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  void** top(u32 fiber) const {
    return reinterpret_cast<void**>(memory_ + (fiber + 1) * kStackBytes - 64);
  }

 private:
  // Never destroyed: blocks may run while the process ends.
  static std::mutex& mutex() {
    static auto& mutex = *new std::mutex;
    return mutex;
  }
  static std::vector<std::byte*>& free() {
    static auto& free = *new std::vector<std::byte*>;
    return free;
  }
  std::byte* memory_;
};

u64 seed_of(const Launch& launch) {
  const char* const text = std::getenv("RINGCOMM_TEST_PTX_SEED");
  const u64 seed = text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
  return (seed + 1) * 0x9e3779b97f4a7c15u + launch.ctaid.x + 1;
}

}  // namespace

u64 take_ns() {
  return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                              std::chrono::steady_clock::now().time_since_epoch())
                              .count());
}

void fail(const Thread& thread, u32 line, const char* format, ...) {
  const Launch& launch = thread.launch();
  std::va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "ptx: %s, line %u, block %u, thread (%u, %u): ", launch.kernel->name, line,
               launch.ctaid.x, thread.tid.x, thread.tid.y);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  va_end(arguments);
  std::abort();
}

// ---- fibers

Block::Block(const Launch& facts)
    : launch(facts),
      memory(begin_block(facts)),
      num_threads_(facts.ntid.count()),
      threads_(std::make_unique<Thread[]>(num_threads_)),
      random_(seed_of(facts)) {
  for (u32 i = 0; i < num_threads_; ++i) {
    Thread& thread = threads_[i];
    thread.block = this;
    thread.linear = i;
    thread.tid = {i % facts.ntid.x, i / facts.ntid.x % facts.ntid.y,
                  i / facts.ntid.x / facts.ntid.y};
  }
}

bool Block::coin() {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return (random_ >> 32 & 1) != 0;
}

void Block::enter() {
  Block& block = *current;
  Thread& thread = *block.running_;
  block.launch.kernel->run(thread);
  thread.end();
  block.leave(thread);
  std::abort();  // nothing switches to a fiber that has ended
}

void Block::switch_to(Thread& thread) {
  running_ = &thread;
  ringcomm_ptx_switch(&scheduler_, thread.stack_pointer_);
}

void Block::leave(Thread& thread) { ringcomm_ptx_switch(&thread.stack_pointer_, scheduler_); }

void Block::run() {
  const Stacks stacks;
  current = this;
  for (u32 i = 0; i < num_threads_; ++i) {
    void** top = stacks.top(i);
    *--top = nullptr;  // a function's stack is aligned as after a call
    *--top = reinterpret_cast<void*>(&Block::enter);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    threads_[i].stack_pointer_ = top;
  }
  const bool is_random = std::getenv("RINGCOMM_TEST_PTX_SEED") != nullptr;
  u32 num_idle = 0;
  while (num_done_ < num_threads_) {
    const u64 polls_before = num_polls_;
    u32 num_ran = 0;
    const u32 first = is_random ? static_cast<u32>(random_ >> 32) % num_threads_ : 0;
    const bool is_backward = is_random && coin();
    for (u32 i = 0; i < num_threads_; ++i) {
      const u32 at = (first + (is_backward ? num_threads_ - i : i)) % num_threads_;
      if (threads_[at].state_ != Thread::State::kReady) continue;
      ++num_ran;
      switch_to(threads_[at]);
    }
    complete_loads();
    if (num_ran == 0 && num_done_ < num_threads_) report_deadlock();
    // All that ran only polled: what they wait for is on other threads of the host.
    if (num_ran == 0 || num_polls_ - polls_before < num_ran) continue;
    if (++num_idle % kPollsPerSleep == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    else
      sched_yield();
  }
  current = nullptr;
}

void Block::report_deadlock() {
  for (u32 i = 0; i < num_threads_; ++i) {
    const Thread& thread = threads_[i];
    if (thread.state_ != Thread::State::kDone)
      fail(thread, thread.line, "deadlock: this thread waits at a barrier; %u of %u have ended",
           num_done_, num_threads_);
  }
  std::abort();
}

void Thread::poll() {
  ++block->num_polls_;
  block->leave(*this);
}

void Thread::end() {
  if (!bulk_stores_.empty()) fail(*this, bulk_stores_.front().line, "a bulk store is not awaited");
  copy_wait(0);
  state_ = State::kDone;
  ++block->num_done_;
  // An exited lane is not waited for.
  const u32 warp = linear - lane();
  for (u32 i = warp; i < std::min(warp + 32, block->num_threads_); ++i)
    if (block->threads_[i].state_ == State::kAtWarp) block->release_warp(block->threads_[i]);
}

// ---- barriers of a block

u32 Block::meet(Thread& thread, u32 number, u32 num_threads, bool value, bool waits) {
  if (number >= barriers_.size()) fail(thread, thread.line, "there is no barrier %u", number);
  if (num_threads == 0 || num_threads % 32 != 0 || num_threads > (num_threads_ + 31) / 32 * 32)
    fail(thread, thread.line, "a barrier of %u threads", num_threads);
  NamedBarrier& barrier = barriers_[number];
  if (barrier.num_arrived == 0) barrier.num_expected = num_threads;
  if (barrier.num_expected != num_threads)
    fail(thread, thread.line, "barrier %u is of %u and of %u threads", number, barrier.num_expected,
         num_threads);
  barrier.num_true += value ? 1 : 0;
  thread.barrier_ = number;
  thread.barrier_threads_ = num_threads;
  if (++barrier.num_arrived == std::min(num_threads, num_threads_)) {
    for (u32 i = 0; i < num_threads_; ++i) {
      Thread& other = threads_[i];
      if (other.state_ != Thread::State::kAtBarrier || other.barrier_ != number) continue;
      other.barrier_count_ = barrier.num_true;
      other.state_ = Thread::State::kReady;
    }
    thread.barrier_count_ = barrier.num_true;
    barrier = {};
    if (waits) leave(thread);  // others may go first
  } else if (waits) {
    thread.state_ = Thread::State::kAtBarrier;
    leave(thread);
  }
  if (waits)
    memory->pass(thread, Barrier::kBlock, std::min(num_threads, num_threads_), Order::kAcqRel);
  return thread.barrier_count_;
}

void Thread::bar_arrive(u32 barrier, u32 num_threads) {
  block->meet(*this, barrier, num_threads, false, false);
}
void Thread::bar_sync(u32 barrier, u32 num_threads) {
  if (memory().skips(*this, line)) {
    if (block->coin()) poll();  // others catch up, or come only later
    return;
  }
  block->meet(*this, barrier, num_threads, false, true);
}
bool Thread::bar_or(u32 barrier, u32 num_threads, bool value) {
  return block->meet(*this, barrier, num_threads, value, true) != 0;
}
bool Thread::bar_and(u32 barrier, u32 num_threads, bool value) {
  return block->meet(*this, barrier, num_threads, value, true) ==
         std::min(num_threads, block->num_threads_);
}
u32 Thread::bar_popc(u32 barrier, u32 num_threads, bool value) {
  return block->meet(*this, barrier, num_threads, value, true);
}

void Thread::cluster_wait(Order order) {
  // The last thread of this block meets the other blocks for all.
  if (++block->num_at_cluster_ == block->num_threads_) {
    block->num_at_cluster_ = 0;
    launch().meet_cluster();
    for (u32 i = 0; i < block->num_threads_; ++i) {
      Thread& other = block->threads_[i];
      if (other.state_ == State::kAtBarrier && other.barrier_ == ~0u) other.state_ = State::kReady;
    }
    block->leave(*this);
  } else {
    barrier_ = ~0u;
    state_ = State::kAtBarrier;
    block->leave(*this);
  }
  memory().pass(*this, Barrier::kCluster, block->num_threads_, order);
}

// ---- shared memory

namespace {
// An address in shared memory: the rank of the block of the cluster plus one, or 0 for this block,
// above 24 bits.
constexpr u32 kRankShift = 24;
constexpr u32 kOffsetMask = (1u << kRankShift) - 1;
}  // namespace

std::byte* Thread::shared_at(u32 address, u32 num_bytes) {
  const Launch& facts = launch();
  const u32 rank = address >> kRankShift == 0 ? facts.cluster_rank : (address >> kRankShift) - 1;
  const u32 offset = address & kOffsetMask;
  if (rank >= facts.cluster_blocks || offset + num_bytes > facts.shared_bytes)
    fail(*this, line, "%u bytes at the shared address %#x, of %u", num_bytes, address,
         facts.shared_bytes);
  return facts.cluster_shared[rank] + offset;
}

u64 Thread::shared_to_generic(u32 address) { return reinterpret_cast<u64>(shared_at(address, 0)); }

u32 Thread::generic_to_shared(u64 address) {
  const Launch& facts = launch();
  return static_cast<u32>(address -
                          reinterpret_cast<u64>(facts.cluster_shared[facts.cluster_rank]));
}

u32 Thread::mapa(u32 address, u32 rank) {
  return (rank + 1) << kRankShift | (address & kOffsetMask);
}

void Thread::check_alignment(u64 address, u64 num_bytes) const {
  if (address % num_bytes != 0)
    fail(*this, line, "an access of %llu bytes at the misaligned shared address %#llx",
         static_cast<unsigned long long>(num_bytes), static_cast<unsigned long long>(address));
}

// ---- launches

void run_block(const Launch& launch) { Block(launch).run(); }

void run_grid(const Kernel& kernel, const void* params, Dim nctaid, Dim ntid,
              u32 dynamic_shared_bytes) {
  constexpr u32 kAlignment = 128;
  const u32 dynamic_at = (kernel.static_shared_bytes + kAlignment - 1) / kAlignment * kAlignment;
  const u32 num_bytes = dynamic_at + dynamic_shared_bytes;
  AlignedBytes memory(num_bytes);
  std::byte* const shared = memory.data();
  for (u32 z = 0; z < nctaid.z; ++z)
    for (u32 y = 0; y < nctaid.y; ++y)
      for (u32 x = 0; x < nctaid.x; ++x) {
        std::memset(shared, 0xab, num_bytes);
        run_block({.kernel = &kernel,
                   .params = params,
                   .ntid = ntid,
                   .ctaid = {x, y, z},
                   .nctaid = nctaid,
                   .cluster_shared = &shared,
                   .shared_bytes = num_bytes,
                   .dynamic_at = dynamic_at});
      }
}

namespace {
std::map<std::string_view, const Kernel*>& kernels() {
  static std::map<std::string_view, const Kernel*> all;
  return all;
}
}  // namespace

Registration::Registration(const Kernel& kernel) { kernels()[kernel.name] = &kernel; }

const Kernel* find_translated(std::string_view name) {
  const auto found = kernels().find(name);
  return found == kernels().end() ? nullptr : found->second;
}

}  // namespace ringcomm::ptx
