// Memory of Triton's kernels, and the launch that triton_library.py calls. An access must be inside
// of a tensor that the launch was given; two threads must not store to a place at the same time,
// nor a block touch what another one stores.
#include <cstring>
#include <unordered_map>
#include <vector>

#include "ptx/machine.h"
#include "ptx/memory.h"

namespace ringcomm::ptx {

/// The elements of a tensor that a launch was given: rows of bytes, which begin a stride apart.
struct TensorMemory {
  u64 begin;
  u64 num_rows;
  u64 row_stride_bytes;
  u64 row_bytes;
};

namespace {

constexpr u32 kNobody = ~0u;
// What one record is of: no element is smaller, but bool's, of which there are few.
constexpr u32 kGranuleBytes = 2;

/// The accesses of a granule in this launch. Threads of a block meet at its barriers: those that
/// have passed equally many of them may run at the same time, and blocks always may.
struct Granule {
  u32 write_block = kNobody, write_thread = kNobody, write_epoch = 0;
  u32 read_block = kNobody;
  bool many_blocks_read = false;
};

struct State {
  std::vector<TensorMemory> tensors;
  std::unordered_map<u64, Granule> granules;
  std::vector<u32> epochs;  // barriers that each thread of the block has passed
  u32 block = kNobody;
};
State& state() {
  static State all;
  return all;
}

bool is_in(const TensorMemory& tensor, u64 address, u32 num_bytes) {
  if (address < tensor.begin) return false;
  const u64 offset = address - tensor.begin;
  return offset / tensor.row_stride_bytes < tensor.num_rows &&
         offset % tensor.row_stride_bytes + num_bytes <= tensor.row_bytes;
}

void check_bounds(const Thread& thread, u64 address, const Access& access, const char* what) {
  if (address % access.num_bytes() != 0)
    fail(thread, access.line, "%s of %u bytes at a misaligned address", what, access.num_bytes());
  for (const TensorMemory& tensor : state().tensors)
    if (is_in(tensor, address, access.num_bytes())) return;
  fail(thread, access.line, "%s of %u bytes outside of all tensors", what, access.num_bytes());
}

u32 epoch_of(const Thread& thread) {
  State& all = state();
  const Launch& facts = thread.launch();
  const u32 block =
      (facts.ctaid.z * facts.nctaid.y + facts.ctaid.y) * facts.nctaid.x + facts.ctaid.x;
  if (all.block != block) {
    all.block = block;
    all.epochs.assign(facts.ntid.count(), 0);
  }
  return all.epochs[thread.linear];
}

// Within a block only stores are compared. Triton lets several threads load an element that one of
// them uses, and another may have overwritten it for the rest.
void read(const Thread& thread, u64 at, u32 line) {
  epoch_of(thread);
  const u32 block = state().block;
  Granule& granule = state().granules[at];
  if (granule.write_block != kNobody && granule.write_block != block)
    fail(thread, line, "a race: it loads what block %u stores", granule.write_block);
  granule.many_blocks_read |= granule.read_block != kNobody && granule.read_block != block;
  granule.read_block = block;
}

void write(const Thread& thread, u64 at, u32 line) {
  const u32 epoch = epoch_of(thread), block = state().block;
  Granule& granule = state().granules[at];
  const bool is_own = granule.write_block == block &&
                      (granule.write_thread == thread.linear || granule.write_epoch != epoch);
  if (granule.write_block != kNobody && !is_own)
    fail(thread, line, "a race: thread %u of block %u stores there too", granule.write_thread,
         granule.write_block);
  if (granule.many_blocks_read || (granule.read_block != kNobody && granule.read_block != block))
    fail(thread, line, "a race: it stores what block %u loads", granule.read_block);
  granule = {block, thread.linear, epoch, granule.read_block, false};
}

template <class F>
void each_granule(u64 address, u32 num_bytes, const F& function) {
  for (u64 at = address / kGranuleBytes; at <= (address + num_bytes - 1) / kGranuleBytes; ++at)
    function(at);
}

struct CheckedMemory final : Memory {
  void load(Thread& thread, u64 address, void* to, const Access& access) override {
    check_bounds(thread, address, access, "a load");
    each_granule(address, access.num_bytes(), [&](u64 at) { read(thread, at, access.line); });
    std::memcpy(to, reinterpret_cast<const void*>(address), access.num_bytes());
  }
  void store(Thread& thread, u64 address, const void* from, const Access& access) override {
    check_bounds(thread, address, access, "a store");
    each_granule(address, access.num_bytes(), [&](u64 at) { write(thread, at, access.line); });
    std::memcpy(reinterpret_cast<void*>(address), from, access.num_bytes());
  }
  u64 atomic(Thread& thread, u64, const Access& access, const std::function<u64(u64)>&) override {
    fail(thread, access.line,
         "an atomic: no kernel here has one, so that results are deterministic");
  }
  // Threads run one after the other.
  void fence(Thread&, Order, Scope, u32) override {}
  void pass(Thread& thread, Barrier barrier, u32, Order) override {
    if (barrier == Barrier::kWarp) return;
    epoch_of(thread);
    ++state().epochs[thread.linear];
  }
};

}  // namespace

std::unique_ptr<Memory> begin_block(const Launch&) { return std::make_unique<CheckedMemory>(); }

}  // namespace ringcomm::ptx

/// Runs a kernel's blocks one after the other. Aborts where the kernel does what a GPU must not.
extern "C" void ringcomm_ptx_launch(const ringcomm::ptx::Kernel* kernel, const void* params,
                                    const ringcomm::ptx::TensorMemory* tensors,
                                    unsigned num_tensors, unsigned grid_x, unsigned grid_y,
                                    unsigned grid_z, unsigned num_threads, unsigned shared_bytes) {
  ringcomm::ptx::State& state = ringcomm::ptx::state();
  state.tensors.assign(tensors, tensors + num_tensors);
  state.granules.clear();
  state.block = ringcomm::ptx::kNobody;
  ringcomm::ptx::run_grid(*kernel, params, {grid_x, grid_y, grid_z}, {num_threads, 1, 1},
                          shared_bytes);
}
