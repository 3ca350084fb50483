// Modules, functions and kernels.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string_view>
#include <thread>
#include <vector>

#include "emulator/capture.h"
#include "emulator/cluster_state.h"
#include "emulator/kernel_registry.h"
#include "emulator/residency.h"
#include "emulator/settings.h"
#include "emulator/stream.h"

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
constexpr unsigned kMaxClusterBlocks = 8;
constexpr std::size_t kMaxBlockSharedBytes = 227 << 10;
constexpr std::size_t kSmSharedBytes = 228 << 10;
constexpr std::size_t kReservedSharedBytes = 1 << 10;  // of each block
constexpr std::align_val_t kParameterAlignment{64};

int blocks_per_sm(unsigned block_threads, std::size_t shared_bytes) {
  const int by_threads = kMaxSmThreads / static_cast<int>(block_threads);
  const int by_memory = static_cast<int>(kSmSharedBytes / (shared_bytes + kReservedSharedBytes));
  return std::min({settings().blocks_per_sm, by_threads, by_memory});
}

/// Runs a host function at the place of a kernel, for torch's operators.
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
  unsigned num_resident = 0;  // the maximum at a time
  int slots_per_block = 1;
  unsigned num_threads = 0;
  unsigned cluster_blocks = 1;
  std::size_t shared_bytes = 0;
};

std::shared_ptr<void> copy_parameter(const void* parameter, std::size_t num_bytes) {
  const auto release = [](void* memory) { ::operator delete(memory, kParameterAlignment); };
  std::shared_ptr<void> copy(
      ::operator new(std::max<std::size_t>(num_bytes, 1), kParameterAlignment), release);
  std::memcpy(copy.get(), parameter, num_bytes);
  return copy;
}

/// Calls function(0) ... function(num - 1), each on a thread of its own, the first on this one.
template <class F>
void run_at_once(unsigned num, const F& function) {
  std::vector<std::jthread> others;
  for (unsigned i = 1; i < num; ++i) others.emplace_back(function, i);
  function(0);
}

/// The slots of a cluster's blocks. A cluster acquires all of them together, or two clusters could
/// deadlock.
std::vector<int> acquire_slots(const Grid& grid) {
  static std::mutex mutex;
  std::unique_lock lock(mutex, std::defer_lock);
  if (grid.cluster_blocks > 1) lock.lock();
  std::vector<int> slots;
  for (unsigned rank = 0; rank < grid.cluster_blocks; ++rank)
    slots.push_back(Residency::of(grid.device).acquire(grid.slots_per_block));
  return slots;
}

/// A block, or those of a cluster.
void run_cluster(const Grid& grid, unsigned cluster) {
  ClusterState state(grid.cluster_blocks, grid.num_threads, grid.shared_bytes, settings().is_late);
  const std::vector<int> slots = acquire_slots(grid);
  const auto run = [&](unsigned thread) {
    BlockContext context = state.context(cluster, grid.num_blocks / grid.cluster_blocks,
                                         thread / grid.num_threads, thread % grid.num_threads);
    grid.kernel->run(grid.parameter.get(), context);
  };
  run_at_once(grid.cluster_blocks * grid.num_threads, run);
  for (const int slot : slots) Residency::of(grid.device).release(slot, grid.slots_per_block);
}

/// Runs the maximum of blocks at a time, and starts a new one when one has ended.
void run_grid(const Grid& grid) {
  Residency::of(grid.device).begin_kernel();
  const unsigned num_clusters = grid.num_blocks / grid.cluster_blocks;
  const unsigned num_resident = std::min(grid.num_blocks, grid.num_resident) / grid.cluster_blocks;
  std::atomic<unsigned> next_cluster = 0;
  run_at_once(std::max(1U, num_resident), [&](unsigned) {
    for (unsigned cluster; (cluster = next_cluster++) < num_clusters;) run_cluster(grid, cluster);
  });
  Residency::of(grid.device).end_kernel();
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
  RINGCOMM_TRY(require_context());
  if (num_blocks == nullptr || block_threads <= 0) return kInvalidValue;
  if (Handles<FunctionTag>::all().find(function) == nullptr) return kInvalidHandle;
  const bool fits =
      block_threads <= static_cast<int>(kMaxBlockThreads) && shared_bytes <= kMaxBlockSharedBytes;
  *num_blocks = fits ? blocks_per_sm(static_cast<unsigned>(block_threads), shared_bytes) : 0;
  return kSuccess;
}

Result api::func_set_attribute(Function function, int attribute, int value) {
  RINGCOMM_TRY(require_context());
  if (Handles<FunctionTag>::all().find(function) == nullptr) return kInvalidHandle;
  const bool is_known = attribute == kMaxDynamicSharedBytes;
  const bool fits = value >= 0 && static_cast<std::size_t>(value) <= kMaxBlockSharedBytes;
  return is_known && fits ? kSuccess : kInvalidValue;
}

namespace {

/// 0: this is no cluster that there can be.
unsigned cluster_blocks_of(const LaunchConfig& config) {
  unsigned num_blocks = 1;
  for (unsigned i = 0; i < config.num_attributes; ++i) {
    const LaunchAttribute& attribute = config.attributes[i];
    const unsigned* cluster = attribute.value.cluster;
    if (attribute.id != kClusterDimension || cluster[1] != 1 || cluster[2] != 1) return 0;
    num_blocks = cluster[0];
  }
  const bool divides = num_blocks > 0 && config.grid[0] % num_blocks == 0;
  return divides && num_blocks <= kMaxClusterBlocks ? num_blocks : 0;
}

}  // namespace

Result api::occupancy_max_active_clusters(int* num_clusters, Function function,
                                          const LaunchConfig* config) {
  if (num_clusters == nullptr || config == nullptr) return kInvalidValue;
  const unsigned cluster_blocks = cluster_blocks_of(*config);
  if (cluster_blocks == 0) return kInvalidValue;
  int per_sm = 0;
  RINGCOMM_TRY(occupancy_max_active_blocks(&per_sm, function, static_cast<int>(config->block[0]),
                                           config->shared_bytes));
  *num_clusters = settings().num_sms * per_sm / static_cast<int>(cluster_blocks);
  return kSuccess;
}

Result api::launch_kernel(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared_bytes, StreamHandle handle, void** parameters,
                          void** extra) {
  const LaunchConfig config = {.grid = {grid_x, grid_y, grid_z},
                               .block = {block_x, block_y, block_z},
                               .shared_bytes = shared_bytes,
                               .stream = handle,
                               .attributes = nullptr,
                               .num_attributes = 0};
  return launch_kernel_ex(&config, function, parameters, extra);
}

Result api::launch_kernel_ex(const LaunchConfig* config, Function function, void** parameters,
                             void** extra) {
  if (config == nullptr) return kInvalidValue;
  std::shared_ptr<StreamTag> stream;
  RINGCOMM_TRY(find_stream(config->stream, &stream));
  const std::shared_ptr<FunctionTag> found = Handles<FunctionTag>::all().find(function);
  if (found == nullptr || found->context != stream->context) return kInvalidHandle;
  const unsigned block_threads = config->block[0];
  if (config->grid[0] == 0 || block_threads == 0 || block_threads > kMaxBlockThreads ||
      parameters == nullptr || parameters[0] == nullptr || extra != nullptr ||
      config->shared_bytes > kMaxBlockSharedBytes)
    return kInvalidValue;
  if (config->grid[1] != 1 || config->grid[2] != 1 || config->block[1] != 1 ||
      config->block[2] != 1)
    return kNotSupported;
  Grid grid;
  grid.cluster_blocks = cluster_blocks_of(*config);
  if (grid.cluster_blocks == 0) return kInvalidValue;
  grid.kernel = found->kernel;
  grid.parameter = copy_parameter(parameters[0], found->kernel->param_bytes);
  grid.device = stream->context->device;
  grid.num_blocks = config->grid[0];
  const int per_sm = blocks_per_sm(block_threads, config->shared_bytes);
  grid.num_resident = static_cast<unsigned>(settings().num_real_sms * per_sm);
  if (grid.num_resident < grid.cluster_blocks) return kInvalidValue;
  grid.slots_per_block = settings().blocks_per_sm / per_sm;
  grid.num_threads = std::min(static_cast<unsigned>(settings().threads_per_block), block_threads);
  grid.shared_bytes = config->shared_bytes;
  return submit(*stream, [grid = std::move(grid)] { run_grid(grid); });
}

}  // namespace ringcomm::emulator
