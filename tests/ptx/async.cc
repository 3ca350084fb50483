// mbarrier objects, and copies that go on while their thread does.
#include <cstdlib>
#include <vector>

#include "ptx/machine.h"

namespace ringcomm::ptx {
namespace {

constexpr u64 kWaitLimitNs = 120'000'000'000;
constexpr u32 kBulkAlignment = 16;

/// The content of an mbarrier, which PTX leaves open: the phase, the arrivals of each phase, those
/// still to come in this one, and the bytes that are announced but have not arrived. Bytes may
/// arrive before they are announced.
struct Mbarrier {
  u64 phase : 1;
  u64 num_arrivals : 20;
  u64 num_pending : 20;
  s64 pending_bytes : 23;
};
static_assert(sizeof(Mbarrier) == sizeof(u64));

}  // namespace

void Thread::mbarrier_init(u32 address, u32 num_arrivals) {
  check_alignment(address, sizeof(u64));
  const auto word = std::bit_cast<u64>(Mbarrier{0, num_arrivals, num_arrivals, 0});
  auto* const place = reinterpret_cast<u64*>(shared_at(address, sizeof word));
  __atomic_store_n(place, word, __ATOMIC_SEQ_CST);
  memory().at_mbarrier(*this, reinterpret_cast<u64>(place), MbarrierEvent::kInit, Order::kWeak,
                       Scope::kCta);
}

void Thread::change_mbarrier(u32 address, u32 num_arrivals, s64 num_bytes) {
  check_alignment(address, sizeof(u64));
  auto* const word = reinterpret_cast<u64*>(shared_at(address, sizeof(u64)));
  u64 seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  for (;;) {
    auto next = std::bit_cast<Mbarrier>(seen);
    if (num_arrivals > next.num_pending)
      fail(*this, line, "more arrivals at an mbarrier than the %u of a phase",
           static_cast<u32>(next.num_arrivals));
    next.num_pending -= num_arrivals;
    next.pending_bytes += num_bytes;
    if (next.num_pending == 0 && next.pending_bytes < 0)
      fail(*this, line, "%lld bytes more at an mbarrier than it expects",
           -static_cast<long long>(next.pending_bytes));
    if (next.num_pending == 0 && next.pending_bytes == 0) {
      next.phase ^= 1;
      next.num_pending = next.num_arrivals;
    }
    if (__atomic_compare_exchange_n(word, &seen, std::bit_cast<u64>(next), false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_RELAXED))
      return;
  }
}

void Thread::mbarrier_arrive(u32 address, u32 expected_bytes) {
  memory().at_mbarrier(*this, reinterpret_cast<u64>(shared_at(address, sizeof(u64))),
                       MbarrierEvent::kArrive, Order::kRelease, Scope::kCta);
  change_mbarrier(address, 1, expected_bytes);
}

void Thread::mbarrier_expect(u32 address, u32 expected_bytes) {
  change_mbarrier(address, 0, expected_bytes);
}

bool Thread::mbarrier_test(u32 address, u32 parity, Order order, Scope scope) {
  check_alignment(address, sizeof(u64));
  auto* const word = reinterpret_cast<u64*>(shared_at(address, sizeof(u64)));
  const auto seen = std::bit_cast<Mbarrier>(__atomic_load_n(word, __ATOMIC_ACQUIRE));
  if (seen.phase != (parity & 1)) {
    first_failed_test_ns_ = 0;
    memory().at_mbarrier(*this, reinterpret_cast<u64>(word), MbarrierEvent::kPass, order, scope);
    return true;
  }
  const u64 now = take_ns();
  if (first_failed_test_ns_ == 0) first_failed_test_ns_ = now;
  if (now - first_failed_test_ns_ > kWaitLimitNs)
    fail(*this, line, "an mbarrier misses %u arrivals and %lld bytes after %llu s",
         static_cast<u32>(seen.num_pending), static_cast<long long>(seen.pending_bytes),
         static_cast<unsigned long long>(kWaitLimitNs / 1'000'000'000));
  poll();
  return false;
}

void Thread::store_async(u32 to, const void* from, u32 element_bytes, u32 num_elements,
                         u32 barrier) {
  const u32 num_bytes = element_bytes * num_elements;
  check_alignment(to, num_bytes);
  put_async(to, from, num_bytes, line);
  complete_bytes(barrier, num_bytes);
}

/// Bytes of this thread's copies arrive in shared memory, maybe another block's; at its barrier.
void Thread::put_async(u32 to, const void* from, u32 num_bytes, u32 at_line) {
  std::byte* const place = shared_at(to, num_bytes);
  if (!memory().has_shared) return void(std::memcpy(place, from, num_bytes));
  memory().store(*this, reinterpret_cast<u64>(place), from, async_access(num_bytes, at_line, true));
}
void Thread::complete_bytes(u32 barrier, u32 num_bytes) {
  memory().at_mbarrier(*this, reinterpret_cast<u64>(shared_at(barrier, sizeof(u64))),
                       MbarrierEvent::kComplete, Order::kRelease, Scope::kCluster);
  change_mbarrier(barrier, 0, -s64{num_bytes});
}

Access Thread::async_access(u32 num_bytes, u32 at_line, bool is_shared) {
  return {.line = at_line,
          .element_bytes = kBulkAlignment,
          .num_elements = num_bytes / kBulkAlignment,
          .proxy = Proxy::kAsync,
          .is_shared = is_shared};
}

// ---- bulk copies

void Thread::bulk_load(u32 to, u64 from, u32 num_bytes, u32 barrier) {
  if ((to | from | num_bytes) % kBulkAlignment != 0)
    fail(*this, line, "a bulk copy of %u bytes from %#llx to %#x: not multiples of 16", num_bytes,
         static_cast<unsigned long long>(from), to);
  const Block::Load made{this, from, to, num_bytes, barrier, line};
  if (block->coin())
    block->complete(made);
  else
    block->loads_.push_back(made);
}

void Block::complete(const Load& made) {
  std::vector<std::byte> loaded(made.num_bytes);
  made.thread->memory().load(*made.thread, made.from, loaded.data(),
                             Thread::async_access(made.num_bytes, made.line, false));
  made.thread->put_async(made.to, loaded.data(), made.num_bytes, made.line);
  made.thread->complete_bytes(made.barrier, made.num_bytes);
}

void Block::complete_loads() {
  while (!loads_.empty()) {
    complete(loads_.front());
    loads_.pop_front();
  }
}

void Thread::bulk_store(u64 to, u32 from, u32 num_bytes) {
  if ((to | from | num_bytes) % kBulkAlignment != 0)
    fail(*this, line, "a bulk copy of %u bytes from %#x to %#llx: not multiples of 16", num_bytes,
         from, static_cast<unsigned long long>(to));
  bulk_stores_.push_back({to, from, num_bytes, num_bytes, bulk_group_, line});
}

void Thread::bulk_wait(u32 num_left) {
  if (memory().orders_nothing(*this, line)) return;
  while (!bulk_stores_.empty() && bulk_group_ - bulk_stores_.front().group > num_left) {
    const Copy& made = bulk_stores_.front();
    std::byte* const from = shared_at(made.shared, made.num_bytes);
    if (memory().has_shared) {
      std::vector<std::byte> read(made.num_bytes);
      memory().load(*this, reinterpret_cast<u64>(from), read.data(),
                    async_access(made.num_bytes, made.line, true));
      memory().store(*this, made.global, read.data(),
                     async_access(made.num_bytes, made.line, false));
    } else {
      memory().store(*this, made.global, from, async_access(made.num_bytes, made.line, false));
    }
    bulk_stores_.pop_front();
  }
}

// ---- cp.async

void Thread::copy_async(u32 to, u64 from, u32 num_bytes, u32 used_bytes) {
  check_alignment(to, num_bytes);
  copies_.push_back({from, to, num_bytes, used_bytes, copy_group_, line});
}

void Thread::copy_wait(u32 num_left) {
  while (!copies_.empty() && (num_left == 0 || copy_group_ - copies_.front().group > num_left)) {
    const Copy& made = copies_.front();
    std::byte* const to = shared_at(made.shared, made.num_bytes);
    std::memset(to, 0, made.num_bytes);
    for (u32 offset = 0; offset < made.used_bytes; offset += 4)
      memory().load(*this, made.global + offset, to + offset,
                    {.line = made.line, .element_bytes = 4});
    copies_.pop_front();
  }
}

}  // namespace ringcomm::ptx
