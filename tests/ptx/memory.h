#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace ringcomm::ptx {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using s8 = std::int8_t;
using s16 = std::int16_t;
using s32 = std::int32_t;
using s64 = std::int64_t;

struct Launch;
class Thread;

/// Bytes that begin at a multiple of 512, as torch's tensors do.
class AlignedBytes {
 public:
  explicit AlignedBytes(std::size_t num_bytes, std::byte value = {})
      : units_(num_bytes / sizeof(Unit) + 1) {
    std::fill_n(data(), num_bytes, value);
  }
  std::byte* data() { return units_.front().bytes; }

 private:
  struct alignas(512) Unit {
    std::byte bytes[512];
  };
  std::vector<Unit> units_;
};

/// The order of an access or a fence, as its PTX instruction names it.
enum class Order : u8 { kWeak, kRelaxed, kAcquire, kRelease, kAcqRel, kSeqCst, kVolatile };
/// Of weak and volatile accesses: kSys.
enum class Scope : u8 { kCta, kCluster, kGpu, kSys };
/// The memory proxy: kAsync for bulk copies.
enum class Proxy : u8 { kGeneric, kAsync };

/// One access of an instruction to global or generic memory. The elements of a vector follow each
/// other; each of them is atomic where PTX says so, the vector is not.
struct Access {
  u32 line = 0;  ///< of the instruction, counted from its kernel's .entry
  u8 element_bytes = 0;
  u32 num_elements = 1;
  Order order = Order::kWeak;
  Scope scope = Scope::kSys;
  Proxy proxy = Proxy::kGeneric;
  bool is_shared = false;  ///< `address` is the host's of shared memory

  u32 num_bytes() const { return element_bytes * num_elements; }
};

/// What the machine tells the memory: a thread has passed a barrier of its block, of its warp or of
/// its cluster with all threads that it waited for.
enum class Barrier : u8 { kBlock, kWarp, kCluster };
/// An mbarrier, by the host's address of its word: a thread initializes it; a thread has arrived,
/// or bytes of its copies have; a thread's test has found that a phase is over.
enum class MbarrierEvent : u8 { kInit, kArrive, kComplete, kPass };

/// The memory of a block from its start to its end. Every access of a kernel to global or generic
/// memory is one of these calls, and every fence. Those to .param, .const and .local memory are
/// not: the machine does them at once. A generic address may point to shared, local or parameter
/// memory, which is host memory too.
/// By itself it is strong: accesses take effect at once, by atomics of the host.
class Memory {
 public:
  /// With `has_shared`, accesses to .shared memory are calls, too.
  explicit Memory(bool shared = false) : has_shared(shared) {}
  virtual ~Memory() = default;
  const bool has_shared;

  /// Aborts, with the kernel and the line, where the address is not a multiple of num_bytes().
  virtual void load(Thread& thread, u64 address, void* to, const Access& access);
  virtual void store(Thread& thread, u64 address, const void* from, const Access& access);
  /// Replaces the element by update(element), and returns what was there. `update` may run more
  /// than once. A comparison that fails returns its argument.
  virtual u64 atomic(Thread& thread, u64 address, const Access& access,
                     const std::function<u64(u64)>& update);
  virtual void fence(Thread& thread, Order order, Scope scope, u32 line);
  /// fence.proxy.async: bulk copies that are issued later see what the thread has stored.
  virtual void fence_proxy(Thread&, u32 /*line*/) {}
  /// fence.mbarrier_init.release.cluster
  virtual void fence_mbarrier_init(Thread&, u32 /*line*/) {}
  /// Whether a mutant leaves out the order of the instruction in this line.
  virtual bool orders_nothing(const Thread&, u32 /*line*/) { return false; }
  /// Whether it leaves out the barrier in this line.
  virtual bool skips(const Thread&, u32 /*line*/) { return false; }

  virtual void pass(Thread&, Barrier, u32 /*num_threads*/, Order) {}
  virtual void arrive_at_cluster(Thread&, Order) {}
  virtual void at_mbarrier(Thread&, u64 /*address*/, MbarrierEvent, Order, Scope) {}
};
std::unique_ptr<Memory> begin_block(const Launch& launch);

}  // namespace ringcomm::ptx
