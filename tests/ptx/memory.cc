// Memory accesses: at once, by atomics of the host, or of the weak memory.
#include "ptx/memory.h"

#include <cstring>

#include "ptx/machine.h"
#include "ptx/weak_accesses.h"

namespace ringcomm::ptx {
namespace {

void check_alignment(const Thread& thread, u64 address, const Access& access) {
  if (address % access.num_bytes() != 0 && access.proxy == Proxy::kGeneric)
    fail(thread, access.line, "an access of %u bytes at the misaligned address %#llx",
         access.num_bytes(), static_cast<unsigned long long>(address));
}

template <class Word>
void load_word(u64 address, void* to, int order) {
  const auto* word = reinterpret_cast<const Word*>(address);
  const Word value = order == __ATOMIC_ACQUIRE ? __atomic_load_n(word, __ATOMIC_ACQUIRE)
                                               : __atomic_load_n(word, __ATOMIC_RELAXED);
  std::memcpy(to, &value, sizeof value);
}

template <class Word>
void store_word(u64 address, const void* from, int order) {
  Word value;
  std::memcpy(&value, from, sizeof value);
  auto* word = reinterpret_cast<Word*>(address);
  if (order == __ATOMIC_RELEASE)
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
  else
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

template <class Word>
u64 update_word(u64 address, const std::function<u64(u64)>& update) {
  auto* word = reinterpret_cast<Word*>(address);
  Word seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &seen, static_cast<Word>(update(seen)), false,
                                      __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return seen;
}

}  // namespace

void load(Thread& thread, u64 address, void* to, const Access& access) {
  check_alignment(thread, address, access);
  if (weak::is_chosen()) return weak::load(thread, address, to, access);
  if (access.proxy == Proxy::kAsync) {
    std::memcpy(to, reinterpret_cast<const void*>(address), access.num_bytes());
    return;
  }
  const int order = access.order == Order::kAcquire ? __ATOMIC_ACQUIRE : __ATOMIC_RELAXED;
  for (u32 i = 0; i < access.num_elements; ++i) {
    const u32 offset = i * access.element_bytes;
    char* const element = static_cast<char*>(to) + offset;
    switch (access.element_bytes) {
      case 1:
        load_word<u8>(address + offset, element, order);
        break;
      case 2:
        load_word<u16>(address + offset, element, order);
        break;
      case 4:
        load_word<u32>(address + offset, element, order);
        break;
      default:
        load_word<u64>(address + offset, element, order);
        break;
    }
  }
}

void store(Thread& thread, u64 address, const void* from, const Access& access) {
  check_alignment(thread, address, access);
  if (weak::is_chosen()) return weak::store(thread, address, from, access);
  if (access.proxy == Proxy::kAsync) {
    std::memcpy(reinterpret_cast<void*>(address), from, access.num_bytes());
    return;
  }
  const int order = access.order == Order::kRelease ? __ATOMIC_RELEASE : __ATOMIC_RELAXED;
  for (u32 i = 0; i < access.num_elements; ++i) {
    const u32 offset = i * access.element_bytes;
    const char* const element = static_cast<const char*>(from) + offset;
    switch (access.element_bytes) {
      case 1:
        store_word<u8>(address + offset, element, order);
        break;
      case 2:
        store_word<u16>(address + offset, element, order);
        break;
      case 4:
        store_word<u32>(address + offset, element, order);
        break;
      default:
        store_word<u64>(address + offset, element, order);
        break;
    }
  }
}

u64 atomic(Thread& thread, u64 address, const Access& access,
           const std::function<u64(u64)>& update) {
  check_alignment(thread, address, access);
  if (weak::is_chosen()) return weak::atomic(thread, address, access, update);
  switch (access.element_bytes) {
    case 2:
      return update_word<u16>(address, update);
    case 4:
      return update_word<u32>(address, update);
    default:
      return update_word<u64>(address, update);
  }
}

void fence(Thread& thread, Order order, Scope scope, u32 line) {
  if (weak::is_chosen()) return weak::fence(thread, order, scope, line);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

void fence_proxy(Thread& thread, u32 line) {
  if (weak::is_chosen()) weak::fence_proxy(thread, line);
}

void fence_mbarrier_init(Thread& thread, u32 line) {
  if (weak::is_chosen()) weak::fence_mbarrier_init(thread, line);
}

bool orders_nothing(const Thread& thread, u32 line) {
  return weak::is_chosen() && weak::orders_nothing(thread, line);
}

bool skips(const Thread& thread, u32 line) {
  return weak::is_chosen() && weak::skips(thread, line);
}

void pass(Thread& thread, Barrier barrier, u32 num_threads, Order order) {
  if (weak::is_chosen()) weak::pass(thread, barrier, num_threads, order);
}

void arrive_at_cluster(Thread& thread, Order order) {
  if (weak::is_chosen()) weak::arrive_at_cluster(thread, order);
}

void at_mbarrier(Thread& thread, u64 address, MbarrierEvent event, Order order, Scope scope) {
  if (weak::is_chosen()) weak::at_mbarrier(thread, address, event, order, scope);
}

std::unique_ptr<BlockMemory> begin_block(const Launch& launch) {
  return weak::is_chosen() ? weak::begin_block(launch) : nullptr;
}

}  // namespace ringcomm::ptx
