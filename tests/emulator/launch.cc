// Modules, functions and kernels.
#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string_view>

#include "emulator/capture.h"
#include "emulator/kernel_registry.h"
#include "emulator/residency.h"
#include "emulator/settings.h"
#include "emulator/stream.h"
#include "emulator/thread_pool.h"

struct ringcomm::cuda::FunctionTag {
  Context context = nullptr;
  const emulator::Kernel* kernel = nullptr;
};

struct ringcomm::cuda::ModuleTag {
  Context context = nullptr;
  std::mutex mutex;
  std::map<std::string_view, std::shared_ptr<FunctionTag>> functions;
};

namespace ringcomm::emulator {
namespace {

constexpr std::string_view kImage = "RINGCOMM-EMULATED";
constexpr unsigned kMaxBlockThreads = 1024;
constexpr int kMaxSmThreads = 2048;
constexpr std::size_t kMaxBlockSharedBytes = 227 << 10;
constexpr std::size_t kSmSharedBytes = 228 << 10;
constexpr std::size_t kReservedSharedBytes = 1 << 10;  // of each block
constexpr std::align_val_t kParameterAlignment{64};

int blocks_per_sm(unsigned block_threads, std::size_t shared_bytes) {
  const int by_threads = kMaxSmThreads / static_cast<int>(block_threads);
  const int by_memory = static_cast<int>(kSmSharedBytes / (shared_bytes + kReservedSharedBytes));
  return std::min({settings().blocks_per_sm, by_threads, by_memory});
}

/// Runs a function of the host as a kernel would run, where its launch says that it does: torch's
/// operators.
void run_function(const void* parameter, BlockContext& context) {
  const auto& p = *static_cast<const FunctionCall*>(parameter);
  if (context.thread_idx == 0) p.function(p.data);
}
constexpr Kernel kFunction = {FunctionCall::kName, sizeof(FunctionCall), run_function};

/// A launch, copied when it was made.
struct Grid {
  const Kernel* kernel = nullptr;
  std::shared_ptr<void> parameter;
  DeviceOrdinal device = 0;
  unsigned num_blocks = 0;
  unsigned num_resident = 0;  // at most so many at a time
  int slots_per_block = 1;
  unsigned num_threads = 0;
};

std::shared_ptr<void> copy_parameter(const void* parameter, std::size_t num_bytes) {
  const auto release = [](void* memory) { ::operator delete(memory, kParameterAlignment); };
  std::shared_ptr<void> copy(
      ::operator new(std::max<std::size_t>(num_bytes, 1), kParameterAlignment), release);
  std::memcpy(copy.get(), parameter, num_bytes);
  return copy;
}

/// What the threads of a block share.
struct BlockState {
  explicit BlockState(unsigned num_threads) : barrier(static_cast<std::ptrdiff_t>(num_threads)) {}
  std::barrier<> barrier;
  alignas(16) std::array<std::byte, BlockContext::kSharedBytes> memory = {};
};

void run_thread(const Grid& grid, unsigned block, unsigned thread, BlockState& state) {
  BlockContext context{.thread_idx = thread,
                       .num_threads = grid.num_threads,
                       .block_idx = block,
                       .num_blocks = grid.num_blocks,
                       .sync = [&state] { state.barrier.arrive_and_wait(); },
                       .shared = state.memory.data()};
  grid.kernel->run(grid.parameter.get(), context);
  state.barrier.arrive_and_wait();  // a block ends as one
}

void run_block(const Grid& grid, unsigned block) {
  const auto state = std::make_shared<BlockState>(grid.num_threads);
  BlockSlots& slots = BlockSlots::of(grid.device);
  const int slot = slots.acquire(grid.slots_per_block);
  for (unsigned thread = 1; thread < grid.num_threads; ++thread)
    ThreadPool::of_process().start(
        [&grid, state, block, thread] { run_thread(grid, block, thread, *state); });
  run_thread(grid, block, 0, *state);
  slots.release(slot, grid.slots_per_block);
}

/// Runs as many blocks at a time as may be, each new one when one has ended.
void run_grid(const Grid& grid) {
  const KernelTurn turn(physical_device(grid.device));
  struct Progress {
    std::atomic<unsigned> next_block = 0;
    std::mutex mutex;
    std::condition_variable is_done;
    unsigned num_workers = 0;
  };
  const auto progress = std::make_shared<Progress>();
  const auto work = [&grid, progress] {
    for (unsigned block; (block = progress->next_block++) < grid.num_blocks;)
      run_block(grid, block);
    const std::lock_guard lock(progress->mutex);
    if (--progress->num_workers == 0) progress->is_done.notify_all();
  };
  progress->num_workers = std::min(grid.num_blocks, grid.num_resident);
  for (unsigned i = 1, workers = progress->num_workers; i < workers; ++i)
    ThreadPool::of_process().start(work);
  work();
  std::unique_lock lock(progress->mutex);
  progress->is_done.wait(lock, [&] { return progress->num_workers == 0; });
}

}  // namespace

Result api::module_load_data(Module* module, const void* image) {
  Context context = nullptr;
  RINGCOMM_TRY(require_context(&context));
  if (module == nullptr || image == nullptr) return kInvalidValue;
  RINGCOMM_TRY(check_unsafe_call());
  if (std::strncmp(static_cast<const char*>(image), kImage.data(), kImage.size()) != 0)
    return kInvalidImage;
  auto made = std::make_shared<ModuleTag>();
  made->context = context;
  *module = Handles<ModuleTag>::all().add(std::move(made));
  return kSuccess;
}

Result api::module_get_function(Function* function, Module module, const char* name) {
  Context context = nullptr;
  RINGCOMM_TRY(require_context(&context));
  if (function == nullptr || name == nullptr) return kInvalidValue;
  const std::shared_ptr<ModuleTag> found = Handles<ModuleTag>::all().find(module);
  if (found == nullptr) return kInvalidHandle;
  const Kernel* kernel = kFunction.name == std::string_view(name) ? &kFunction : find_kernel(name);
  if (kernel == nullptr) return kNotFound;
  const std::lock_guard lock(found->mutex);
  std::shared_ptr<FunctionTag>& known = found->functions[kernel->name];
  if (known == nullptr) {
    if (settings().is_lazy) synchronize_context(context);
    known = std::make_shared<FunctionTag>(FunctionTag{found->context, kernel});
    Handles<FunctionTag>::all().add(known);
  }
  *function = known.get();
  return kSuccess;
}

Result api::occupancy_max_active_blocks(int* num_blocks, Function function, int block_threads,
                                        std::size_t shared_bytes) {
  Context context = nullptr;
  RINGCOMM_TRY(require_context(&context));
  if (num_blocks == nullptr || block_threads <= 0) return kInvalidValue;
  if (Handles<FunctionTag>::all().find(function) == nullptr) return kInvalidHandle;
  const bool fits =
      block_threads <= static_cast<int>(kMaxBlockThreads) && shared_bytes <= kMaxBlockSharedBytes;
  *num_blocks = fits ? blocks_per_sm(static_cast<unsigned>(block_threads), shared_bytes) : 0;
  return kSuccess;
}

Result api::launch_kernel(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared_bytes, StreamHandle handle, void** parameters,
                          void** extra) {
  std::shared_ptr<StreamTag> stream;
  RINGCOMM_TRY(find_stream(handle, &stream));
  const std::shared_ptr<FunctionTag> found = Handles<FunctionTag>::all().find(function);
  if (found == nullptr || found->context != stream->context) return kInvalidHandle;
  if (grid_x == 0 || block_x == 0 || block_x > kMaxBlockThreads || parameters == nullptr ||
      parameters[0] == nullptr || extra != nullptr || shared_bytes > kMaxBlockSharedBytes)
    return kInvalidValue;
  if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1) return kNotSupported;
  Grid grid;
  grid.kernel = found->kernel;
  grid.parameter = copy_parameter(parameters[0], found->kernel->param_bytes);
  grid.device = stream->context->device;
  grid.num_blocks = grid_x;
  const int per_sm = blocks_per_sm(block_x, shared_bytes);
  grid.num_resident = static_cast<unsigned>(settings().num_real_sms * per_sm);
  grid.slots_per_block = settings().blocks_per_sm / per_sm;
  grid.num_threads = std::min(static_cast<unsigned>(settings().threads_per_block), block_x);
  return submit(*stream, [grid = std::move(grid)] { run_grid(grid); });
}

}  // namespace ringcomm::emulator
