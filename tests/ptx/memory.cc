// Memory whose accesses take effect at once.
#include "ptx/memory.h"

#include <cstring>

#include "ptx/machine.h"

namespace ringcomm::ptx {
namespace {

void check_alignment(const Thread& thread, u64 address, const Access& access) {
  if (address % access.num_bytes() != 0 && access.proxy == Proxy::kGeneric)
    fail(thread, access.line, "an access of %u bytes at the misaligned address %#llx",
         access.num_bytes(), static_cast<unsigned long long>(address));
}

/// body(Word{}) with the unsigned type of an element.
template <class Body>
auto with_word(u32 num_bytes, const Body& body) {
  switch (num_bytes) {
    case 1:
      return body(u8{});
    case 2:
      return body(u16{});
    case 4:
      return body(u32{});
    default:
      return body(u64{});
  }
}

/// body(offset, Word{}) for each element.
template <class Body>
void for_elements(const Access& access, const Body& body) {
  with_word(access.element_bytes, [&](auto word) {
    for (u32 i = 0; i < access.num_elements; ++i) body(i * access.element_bytes, word);
  });
}

template <class Word>
Word* at(u64 address) {
  return reinterpret_cast<Word*>(address);
}

}  // namespace

void Memory::load(Thread& thread, u64 address, void* to, const Access& access) {
  check_alignment(thread, address, access);
  if (access.proxy == Proxy::kAsync)
    return void(std::memcpy(to, at<const void>(address), access.num_bytes()));
  for_elements(access, [&](u32 offset, auto word) {
    const auto* const from = at<const decltype(word)>(address + offset);
    word = access.order == Order::kAcquire ? __atomic_load_n(from, __ATOMIC_ACQUIRE)
                                           : __atomic_load_n(from, __ATOMIC_RELAXED);
    std::memcpy(static_cast<char*>(to) + offset, &word, sizeof word);
  });
}

void Memory::store(Thread& thread, u64 address, const void* from, const Access& access) {
  check_alignment(thread, address, access);
  if (access.proxy == Proxy::kAsync)
    return void(std::memcpy(at<void>(address), from, access.num_bytes()));
  for_elements(access, [&](u32 offset, auto word) {
    std::memcpy(&word, static_cast<const char*>(from) + offset, sizeof word);
    auto* const to = at<decltype(word)>(address + offset);
    if (access.order == Order::kRelease)
      __atomic_store_n(to, word, __ATOMIC_RELEASE);
    else
      __atomic_store_n(to, word, __ATOMIC_RELAXED);
  });
}

u64 Memory::atomic(Thread& thread, u64 address, const Access& access,
                   const std::function<u64(u64)>& update) {
  check_alignment(thread, address, access);
  return with_word(access.element_bytes, [&](auto seen) -> u64 {
    auto* const word = at<decltype(seen)>(address);
    seen = __atomic_load_n(word, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(word, &seen, static_cast<decltype(seen)>(update(seen)),
                                        false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return seen;
  });
}

void Memory::fence(Thread&, Order, Scope, u32) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

}  // namespace ringcomm::ptx
