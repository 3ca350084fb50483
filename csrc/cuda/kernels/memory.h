#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "kernels/common/elements.h"

// How threads move bytes together. A thread hides memory latency by issuing several
// loads before it uses the first. The compiler keeps that order only without a branch, or a store
// that may alias, between the loads. So a conditional load or store is one predicated instruction,
// and all loads of a group precede its first store.

namespace ringcomm::cuda {

/// Whether it should stay in a full L2 cache: what peers read next, yes; users' buffers,
/// which a large call touches once, no.
enum class Cached : std::uint8_t { kNo, kYes };

RINGCOMM_HD inline bool is_aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

/// The number, hidden from the compiler, which otherwise keeps a pointer for every load of a loop
/// in registers that are needed for data.
RINGCOMM_HD inline std::uint32_t opaque(std::uint32_t number) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(number));
#endif
  return number;
}

/// Goes between loads and their first use, which the assembler otherwise moves before the last
/// load. For whole warps.
RINGCOMM_HD inline void end_of_loads() {
#ifdef __CUDA_ARCH__
  __syncwarp();
#endif
}

#ifdef __CUDA_ARCH__
// Zero first: otherwise the register would have to keep its old value through the loops.
#define RINGCOMM_LOAD_VECTOR(load, v, from, is_wanted)                             \
  asm volatile(                                                                    \
      "{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; "       \
      "mov.b32 %2, 0; mov.b32 %3, 0; @p " load ".v4.u32 {%0, %1, %2, %3}, [%4]; }" \
      : "=&r"(v.words[0]), "=&r"(v.words[1]), "=&r"(v.words[2]), "=&r"(v.words[3]) \
      : "l"(from), "r"(static_cast<int>(is_wanted))                                \
      : "memory")
#define RINGCOMM_STORE_VECTOR(store, v, to, is_wanted)                     \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p " store           \
               ".v4.u32 [%4], {%0, %1, %2, %3}; }" ::"r"(v.words[0]),      \
               "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3]), "l"(to), \
               "r"(static_cast<int>(is_wanted))                            \
               : "memory")
#define RINGCOMM_LOAD_TWO_WORDS(words, from, is_wanted)                      \
  asm volatile(                                                              \
      "{ .reg .pred p; setp.ne.b32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; " \
      "@p ld.global.v2.u32 {%0, %1}, [%2]; }"                                \
      : "=&r"(words[0]), "=&r"(words[1])                                     \
      : "l"(from), "r"(static_cast<int>(is_wanted))                          \
      : "memory")
#define RINGCOMM_STORE_TWO_WORDS(words, to, is_wanted)                                     \
  asm volatile(                                                                            \
      "{ .reg .pred p; setp.ne.b32 p, %3, 0; @p st.global.v2.u32 [%2], {%0, %1}; }" ::"r"( \
          words[0]),                                                                       \
      "r"(words[1]), "l"(to), "r"(static_cast<int>(is_wanted))                             \
      : "memory")
#define RINGCOMM_LOAD_WORD(type, word, from, is_wanted)                                  \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global." type \
               " %0, [%1]; }"                                                            \
               : "=&r"(word)                                                             \
               : "l"(from), "r"(static_cast<int>(is_wanted))                             \
               : "memory")
#define RINGCOMM_STORE_WORD(type, word, to, is_wanted)                    \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.global." type \
               " [%1], %0; }" ::"r"(word),                                \
               "l"(to), "r"(static_cast<int>(is_wanted))                  \
               : "memory")
#endif

/// The vectors that hold a pack.
template <class P>
inline constexpr std::size_t kVectorsOf = (sizeof(P) + sizeof(Vector) - 1) / sizeof(Vector);

/// What is at `from`, if it `is_wanted`, else zeros: of a size that one instruction moves, or of
/// several vectors. The compiler does not know that the pointers, which it reads from memory, are
/// global; each access states it.
template <Cached kCached, class P>
RINGCOMM_HD inline P load_pack(const void* from, bool is_wanted = true) {
  P pack;
#ifdef __CUDA_ARCH__
  Vector vectors[kVectorsOf<P>] = {};
  std::uint32_t (&words)[4] = vectors[0].words;
  if constexpr (sizeof(P) >= sizeof(Vector)) {
    RINGCOMM_UNROLL
    for (std::size_t i = 0; i < kVectorsOf<P>; ++i) {
      const void* const part = static_cast<const Vector*>(from) + i;
      if constexpr (kCached == Cached::kYes)
        RINGCOMM_LOAD_VECTOR("ld.global", vectors[i], part, is_wanted);
      else
        RINGCOMM_LOAD_VECTOR("ld.global.cs", vectors[i], part, is_wanted);
    }
  } else if constexpr (sizeof(P) == 8)
    RINGCOMM_LOAD_TWO_WORDS(words, from, is_wanted);
  else if constexpr (sizeof(P) == 4)
    RINGCOMM_LOAD_WORD("u32", words[0], from, is_wanted);
  else if constexpr (sizeof(P) == 2)
    RINGCOMM_LOAD_WORD("u16", words[0], from, is_wanted);
  else
    RINGCOMM_LOAD_WORD("u8", words[0], from, is_wanted);
  __builtin_memcpy(&pack, vectors, sizeof pack);
#else
  __builtin_memset(&pack, 0, sizeof pack);
  if (is_wanted) __builtin_memcpy(&pack, from, sizeof pack);
#endif
  return pack;
}

template <Cached kCached, class P>
RINGCOMM_HD inline void store_pack(void* to, const P& pack, bool is_wanted = true) {
#ifdef __CUDA_ARCH__
  Vector vectors[kVectorsOf<P>] = {};
  std::uint32_t (&words)[4] = vectors[0].words;
  __builtin_memcpy(vectors, &pack, sizeof pack);
  if constexpr (sizeof(P) >= sizeof(Vector)) {
    RINGCOMM_UNROLL
    for (std::size_t i = 0; i < kVectorsOf<P>; ++i) {
      void* const part = static_cast<Vector*>(to) + i;
      if constexpr (kCached == Cached::kYes)
        RINGCOMM_STORE_VECTOR("st.global", vectors[i], part, is_wanted);
      else
        RINGCOMM_STORE_VECTOR("st.global.cs", vectors[i], part, is_wanted);
    }
  } else if constexpr (sizeof(P) == 8)
    RINGCOMM_STORE_TWO_WORDS(words, to, is_wanted);
  else if constexpr (sizeof(P) == 4)
    RINGCOMM_STORE_WORD("u32", words[0], to, is_wanted);
  else if constexpr (sizeof(P) == 2)
    RINGCOMM_STORE_WORD("u16", words[0], to, is_wanted);
  else
    RINGCOMM_STORE_WORD("u8", words[0], to, is_wanted);
#else
  if (is_wanted) __builtin_memcpy(to, &pack, sizeof pack);
#endif
}

/// Vectors that a thread has in registers. `make kernel-sweep HELD=8` measures another number.
#ifndef RINGCOMM_HELD_VECTORS
#define RINGCOMM_HELD_VECTORS 4
#endif
inline constexpr std::uint32_t kHeldVectors = RINGCOMM_HELD_VECTORS;

template <class Unit, class Threads>
RINGCOMM_HD void copy_units(const Threads& threads, std::byte* to, const std::byte* from,
                            std::uint32_t num_units) {
  RINGCOMM_ROLLED
  for (std::uint32_t i = threads.thread_idx(); i < num_units; i += threads.num_threads())
    store_pack<Cached::kYes>(to + std::size_t{i} * sizeof(Unit),
                             load_pack<Cached::kYes, Unit>(from + std::size_t{i} * sizeof(Unit)));
}

/// memcpy by threads that are numbered, of less than 4 GiB; of a block, others may read the result
/// after a sync.
template <Cached kFrom = Cached::kYes, Cached kTo = Cached::kYes, class Threads>
RINGCOMM_HD void copy_by_threads(const Threads& threads, std::byte* to, const std::byte* from,
                                 std::uint32_t num_bytes) {
  const bool is_whole = is_aligned(to, sizeof(Vector)) && is_aligned(from, sizeof(Vector));
  const std::uint32_t num_vectors = is_whole ? num_bytes / sizeof(Vector) : 0;
  RINGCOMM_ROLLED
  for (std::uint32_t first = 0; first < num_vectors;
       first += kHeldVectors * threads.num_threads()) {
    Vector held[kHeldVectors];
    RINGCOMM_UNROLL
    for (std::uint32_t u = 0; u < kHeldVectors; ++u) {
      const std::uint32_t idx = opaque(first + u * threads.num_threads() + threads.thread_idx());
      held[u] =
          load_pack<kFrom, Vector>(from + std::size_t{idx} * sizeof(Vector), idx < num_vectors);
    }
    end_of_loads();
    RINGCOMM_UNROLL
    for (std::uint32_t u = 0; u < kHeldVectors; ++u) {
      const std::uint32_t idx = opaque(first + u * threads.num_threads() + threads.thread_idx());
      store_pack<kTo>(to + std::size_t{idx} * sizeof(Vector), held[u], idx < num_vectors);
    }
  }
  // What is left of vectors: all if an address is not aligned.
  const auto done = static_cast<std::uint32_t>(num_vectors * sizeof(Vector));
  if (done == num_bytes) return;
  to += done;
  from += done;
  num_bytes -= done;
  const std::uint32_t num_words = is_aligned(to, 4) && is_aligned(from, 4) ? num_bytes / 4 : 0;
  copy_units<std::uint32_t>(threads, to, from, num_words);
  copy_units<std::byte>(threads, to + num_words * 4, from + num_words * 4,
                        num_bytes - num_words * 4);
}

}  // namespace ringcomm::cuda
