#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string_view>

#include "ptx/memory.h"

namespace ringcomm::ptx {

class Block;
class Thread;

/// An .entry of a PTX file, translated to C++ (translate.py).
struct Kernel {
  const char* name;
  u32 param_bytes;
  u32 static_shared_bytes;
  void (*run)(Thread& thread);
};

struct Dim {
  u32 x = 1, y = 1, z = 1;
  u32 count() const { return x * y * z; }
};

/// What a block knows of its launch.
struct Launch {
  const Kernel* kernel = nullptr;
  const void* params = nullptr;
  Dim ntid = {}, ctaid = {}, nctaid = {};
  u32 cluster_rank = 0;
  u32 cluster_blocks = 1;
  /// The shared memory of each block of the cluster: the kernel's own, then from dynamic_at the
  /// launch's. Its content is anything.
  std::byte* const* cluster_shared = nullptr;
  u32 shared_bytes = 0;
  u32 dynamic_at = 0;
  u32 gpu = 0;                                 ///< for the scopes of accesses
  std::function<void()> meet_cluster = [] {};  ///< returns when all blocks of the cluster called it
};

/// Runs a block on this thread of the host, each of its threads as a fiber. Aborts with the kernel
/// and the line of its PTX where it does what a GPU must not.
void run_block(const Launch& launch);
/// Runs the blocks of a grid one after the other. For kernels whose blocks do not wait.
void run_grid(const Kernel& kernel, const void* params, Dim nctaid, Dim ntid,
              u32 dynamic_shared_bytes);

/// Ends the process with a message.
[[noreturn, gnu::format(printf, 3, 4)]] void fail(const Thread& thread, u32 line,
                                                  const char* format, ...);

enum class Shuffle : u8 { kUp, kDown, kBfly, kIdx };

/// A thread of a block: what its kernel calls.
class Thread {
 public:
  Block* block = nullptr;
  u32 line = 0;  ///< of the last instruction that may wait
  Dim tid = {};
  u32 linear = 0;

  const Launch& launch() const;
  Memory& memory() const;
  u32 lane() const { return linear % 32; }

  // ---- barriers and warps

  /// To let others run: after an access that may be part of a wait.
  void poll();
  void bar_arrive(u32 barrier, u32 num_threads);
  void bar_sync(u32 barrier, u32 num_threads);
  bool bar_or(u32 barrier, u32 num_threads, bool value);
  bool bar_and(u32 barrier, u32 num_threads, bool value);
  u32 bar_popc(u32 barrier, u32 num_threads, bool value);
  void cluster_arrive(Order order) { memory().arrive_at_cluster(*this, order); }
  void cluster_wait(Order order);

  void warp_sync(u32 mask);
  u32 shfl(Shuffle kind, u32 value, u32 operand, u32 control, u32 mask, bool& is_in_range);
  u32 ballot(bool value, u32 mask);
  bool vote_any(bool value, u32 mask) { return ballot(value, mask) != 0; }
  bool vote_all(bool value, u32 mask) { return ballot(value, mask) == mask; }
  template <class T>
  T redux(T (*combine)(T, T), T value, u32 mask) {
    meet_warp(mask, std::bit_cast<u32>(value));
    T result = std::bit_cast<T>(lanes_[static_cast<u32>(std::countr_zero(mask))]);
    for (u32 i = static_cast<u32>(std::countr_zero(mask)) + 1; i < 32; ++i)
      if ((mask >> i & 1) != 0) result = combine(result, std::bit_cast<T>(lanes_[i]));
    return result;
  }
  /// Row addresses come from lanes 8 i to 8 i + 7 for matrix i.
  void ldmatrix(u32 address, bool is_transposed, u32 num_matrices, u32* to);
  void stmatrix(u32 address, bool is_transposed, u32 num_matrices, const u32* from);

  // ---- shared memory

  /// Of this block or, by an address that mapa() made, of another one of the cluster.
  std::byte* shared_at(u32 address, u32 num_bytes);
  u64 shared_to_generic(u32 address);
  u32 generic_to_shared(u64 address);
  u32 mapa(u32 address, u32 rank);

  template <class T>
  void load_shared(u32 address, T* to, u32 num_elements, Order order = Order::kWeak) {
    check_alignment(address, num_elements * sizeof(T));
    const std::byte* const from = shared_at(address, num_elements * sizeof(T));
    if (memory().has_shared)
      return memory().load(*this, reinterpret_cast<u64>(from), to,
                           shared_access<T>(num_elements, order));
    std::memcpy(to, from, num_elements * sizeof(T));
  }
  template <class T>
  void store_shared(u32 address, const T* from, u32 num_elements, Order order = Order::kWeak) {
    check_alignment(address, num_elements * sizeof(T));
    std::byte* const to = shared_at(address, num_elements * sizeof(T));
    if (memory().has_shared)
      return memory().store(*this, reinterpret_cast<u64>(to), from,
                            shared_access<T>(num_elements, order));
    std::memcpy(to, from, num_elements * sizeof(T));
  }

  // ---- asynchronous copies (async.cc)

  void mbarrier_init(u32 address, u32 num_arrivals);
  void mbarrier_arrive(u32 address, u32 expected_bytes);
  void mbarrier_expect(u32 address, u32 expected_bytes);
  bool mbarrier_test(u32 address, u32 parity, Order order, Scope scope);
  /// st.async: stores and completes the bytes on a barrier, both maybe of another block.
  void store_async(u32 to, const void* from, u32 element_bytes, u32 num_elements, u32 barrier);
  /// cp.async.bulk to shared memory. Takes effect at once, or after other threads ran.
  void bulk_load(u32 to, u64 from, u32 num_bytes, u32 barrier);
  /// cp.async.bulk to global memory: reads shared memory when it is waited for, as late as may be.
  void bulk_store(u64 to, u32 from, u32 num_bytes);
  void bulk_commit() { ++bulk_group_; }
  void bulk_wait(u32 num_left);
  /// cp.async of `used_bytes`, the rest of `num_bytes` zeros; takes effect when it is waited for.
  void copy_async(u32 to, u64 from, u32 num_bytes, u32 used_bytes);
  void copy_commit() { ++copy_group_; }
  void copy_wait(u32 num_left);

 private:
  friend class Block;
  enum class State : u8 { kReady, kAtBarrier, kAtWarp, kDone };
  struct Copy {
    u64 global;
    u32 shared;
    u32 num_bytes;
    u32 used_bytes;
    u32 group;
    u32 line;
  };

  template <class T>
  Access shared_access(u32 num_elements, Order order) const {
    return {.line = line,
            .element_bytes = sizeof(T),
            .num_elements = num_elements,
            .order = order,
            .is_shared = true};
  }
  void meet_warp(u32 mask, u32 value);
  u32 matrix_element(u32 matrix, bool is_transposed, u32 element) const;
  void check_alignment(u64 address, u64 num_bytes) const;
  void change_mbarrier(u32 address, u32 num_arrivals, s64 num_bytes);
  void put_async(u32 to, const void* from, u32 num_bytes, u32 at_line);
  void complete_bytes(u32 barrier, u32 num_bytes);
  static Access async_access(u32 num_bytes, u32 at_line, bool is_shared);
  void end();

  void* stack_pointer_ = nullptr;
  State state_ = State::kReady;
  u32 barrier_ = 0;
  u32 barrier_count_ = 0;  // of threads that gave true
  u32 barrier_threads_ = 0;
  u32 warp_mask_ = 0;
  u32 warp_value_ = 0;
  std::array<u32, 32> lanes_ = {};  // what each lane gave to the last operation of the warp
  u64 first_failed_test_ns_ = 0;
  std::deque<Copy> bulk_stores_, copies_;
  u32 bulk_group_ = 0;
  u32 copy_group_ = 0;
};

/// The fibers of a block and what they share.
class Block {
 public:
  explicit Block(const Launch& launch);
  void run();

  const Launch launch;
  const std::unique_ptr<Memory> memory;
  u32 num_threads() const { return num_threads_; }
  /// True at random, the same way each run for a RINGCOMM_TEST_PTX_SEED.
  bool coin();

 private:
  friend class Thread;
  friend u64 take_ns();
  struct NamedBarrier {
    u32 num_arrived = 0;
    u32 num_expected = 0;
    u32 num_true = 0;
  };
  struct Load {
    Thread* thread;
    u64 from;
    u32 to;
    u32 num_bytes;
    u32 barrier;
    u32 line;
  };

  static void enter();
  void switch_to(Thread& thread);
  void leave(Thread& thread);
  u32 meet(Thread& thread, u32 barrier, u32 num_threads, bool value, bool waits);
  void release_warp(Thread& thread);
  void complete_loads();
  void complete(const Load& load);
  [[noreturn]] void report_deadlock();

  u32 num_threads_;
  std::unique_ptr<Thread[]> threads_;
  std::array<NamedBarrier, 16> barriers_ = {};
  u32 num_at_cluster_ = 0;
  u32 num_done_ = 0;
  std::deque<Load> loads_;
  void* scheduler_ = nullptr;
  Thread* running_ = nullptr;
  u64 num_polls_ = 0;
  u64 random_;
};

inline const Launch& Thread::launch() const { return block->launch; }
inline Memory& Thread::memory() const { return *block->memory; }

/// %globaltimer
u64 take_ns();

/// Makes a kernel known by its name (kernels.cc).
struct Registration {
  explicit Registration(const Kernel& kernel);
};
const Kernel* find_translated(std::string_view name);

}  // namespace ringcomm::ptx
