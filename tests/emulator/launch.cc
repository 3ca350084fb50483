// Modules, functions, kernels, and the room that their blocks have on a GPU.
#include <dlfcn.h>
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <string_view>

#include "emulator/kernel_registry.h"
#include "emulator/settings.h"
#include "emulator/stream.h"

struct ringcomm::cuda::FunctionTag {
  Context context = nullptr;
  const emulator::Kernel* kernel = nullptr;
};

struct ringcomm::cuda::ModuleTag {
  Context context = nullptr;
  std::mutex mutex = {};
  std::map<std::string_view, std::shared_ptr<FunctionTag>> functions = {};
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

/// 0: there can be no such block.
int blocks_per_sm(unsigned block_threads, std::size_t shared_bytes) {
  if (block_threads == 0 || block_threads > kMaxBlockThreads || shared_bytes > kMaxBlockSharedBytes)
    return 0;
  const int by_threads = kMaxSmThreads / static_cast<int>(block_threads);
  const int by_memory = static_cast<int>(kSmSharedBytes / (shared_bytes + kReservedSharedBytes));
  return std::min({settings().blocks_per_sm, by_threads, by_memory});
}

// ---- the room on a GPU, for which kernels of all streams of all processes of the machine compete

// It is locks on bytes of this library's file, each on a file description of its own, which the
// system closes when a process ends. They add no memory order, so that ThreadSanitizer detects
// races between kernels that no event orders.
constexpr int kTurnByte = 0;
constexpr int kFirstSlotByte = 1;
constexpr int kDeviceBits = 20;  // of an offset: a byte of a GPU
constexpr int kBoxBits = 26;     // and one of the GPUs of a box

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::abort();
}

/// The library's own file, which all have.
host::UniqueFd open_library() {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<void*>(&open_library), &info) == 0) fail("libcuda_emulator: dladdr");
  static const int first = open(info.dli_fname, O_RDWR | O_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(first);  // if it is replaced
  host::UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) fail("libcuda_emulator: cannot open the library's file to lock it");
  return fd;
}

/// Locks bytes of a GPU until the file is closed; `waits` until that can be. False where another
/// block or process has them.
bool lock_bytes(const host::UniqueFd& file, int device, int begin, int num_bytes, bool waits) {
  struct flock range = {};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_start = (off_t{settings().box} << kBoxBits) + (off_t{device} << kDeviceBits) + begin;
  range.l_len = num_bytes;
  while (fcntl(file.get(), waits ? F_OFD_SETLKW : F_OFD_SETLK, &range) != 0) {
    if (!waits && (errno == EAGAIN || errno == EACCES)) return false;
    if (errno != EINTR) fail("libcuda_emulator: cannot lock the library's file");
  }
  return true;
}

/// Without MPS, reserves the GPU for the kernels of this process, which share it, while this lives.
std::shared_ptr<host::UniqueFd> take_turn(ContextTag& context) {
  if (settings().has_mps) return nullptr;
  const std::lock_guard lock(context.turn_mutex);
  std::shared_ptr<host::UniqueFd> turn = context.turn.lock();
  if (turn != nullptr) return turn;
  context.turn = turn = std::make_shared<host::UniqueFd>(open_library());
  lock_bytes(*turn, context.device, kTurnByte, 1, true);
  return turn;
}

/// Waits until a multiprocessor has `num_slots` adjacent free slots for a block; uses all
/// multiprocessors before it puts a second block on one. They are taken until this is closed.
host::UniqueFd take_slots(int device, int num_slots) {
  static std::atomic<unsigned> next_sm = 0;  // where to look first, which is probably free
  const int num_sms = settings().num_real_sms, per_sm = settings().blocks_per_sm;
  const auto first_sm = static_cast<int>(next_sm.fetch_add(1, std::memory_order_relaxed) %
                                         static_cast<unsigned>(num_sms));
  host::UniqueFd file = open_library();
  for (;;) {
    for (int in_sm = 0; in_sm + num_slots <= per_sm; ++in_sm)
      for (int i = 0; i < num_sms; ++i) {
        const int slot = (first_sm + i) % num_sms * per_sm + in_sm;
        if (lock_bytes(file, device, kFirstSlotByte + slot, num_slots, false)) return file;
      }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

// ---- kernels

/// Runs a host function at the place of a kernel, for torch's operators.
void run_function(const Kernel&, const void* parameter, BlockContext& context) {
  const auto& p = *static_cast<const FunctionCall*>(parameter);
  if (context.thread_idx == 0) p.function(p.data);
}
constexpr Kernel kFunction = {FunctionCall::kName, sizeof(FunctionCall), run_function};

struct alignas(64) ParameterLine {
  std::byte bytes[64];
};

/// A launch, copied when it was made.
struct Grid {
  const Kernel* kernel = nullptr;
  std::vector<ParameterLine> parameter = {};
  Context context = nullptr;
  unsigned num_blocks = 0;
  unsigned num_resident = 0;  // the maximum at a time
  int slots_per_block = 1;
  unsigned num_threads = 0;
  unsigned cluster_blocks = 1;
  unsigned num_parts = 1;  // of a block: those of one threadIdx.y are as a block of their own
  unsigned block_width = 1, block_height = 1;
  std::size_t shared_bytes = 0;
};

/// Calls function(0) ... function(num - 1), each on a thread of its own, the first on this one.
template <class F>
void run_at_once(unsigned num, const F& function) {
  std::vector<std::jthread> others;
  for (unsigned i = 1; i < num; ++i) others.emplace_back(function, i);
  function(0);
}

/// A block, or those of a cluster, which takes all of its slots together, or two clusters could
/// deadlock.
void run_cluster(const Grid& grid, unsigned cluster) {
  static std::mutex mutex;
  const unsigned num_parts = grid.cluster_blocks * grid.num_parts;
  ClusterState state(num_parts, grid.num_threads, grid.shared_bytes);
  std::unique_lock lock(mutex, std::defer_lock);
  if (grid.cluster_blocks > 1) lock.lock();
  std::vector<host::UniqueFd> slots;
  for (unsigned rank = 0; rank < grid.cluster_blocks; ++rank)
    slots.push_back(take_slots(grid.context->device, grid.slots_per_block));
  if (lock.owns_lock()) lock.unlock();
  run_at_once(num_parts * grid.num_threads, [&](unsigned thread) {
    BlockContext context = state.context(cluster, grid.num_blocks / grid.cluster_blocks,
                                         thread / grid.num_threads, thread % grid.num_threads);
    context.block_width = grid.block_width;
    context.block_height = grid.block_height;
    grid.kernel->run(grid.parameter.data(), context);
  });
}

/// Runs the maximum of blocks at a time, and starts a new one when one has ended.
void run_grid(const Grid& grid) {
  const std::shared_ptr<host::UniqueFd> turn = take_turn(*grid.context);
  const unsigned num_clusters = grid.num_blocks / grid.cluster_blocks;
  const unsigned num_resident = std::min(grid.num_blocks, grid.num_resident) / grid.cluster_blocks;
  std::atomic<unsigned> next_cluster = 0;
  run_at_once(std::max(1U, num_resident), [&](unsigned) {
    for (unsigned cluster; (cluster = next_cluster++) < num_clusters;) run_cluster(grid, cluster);
  });
}

/// The blocks of a launch's clusters; 0: this is no cluster that there can be.
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

Result api::module_load_data(Module* module, const void* image) {
  RINGCOMM_GET(Context, context, require_context(&context));
  RINGCOMM_TRY(check_unsafe_call());
  if (std::strncmp(static_cast<const char*>(image), kImage.data(), kImage.size()) != 0)
    return kInvalidImage;
  *module = Handles<ModuleTag>::all().add(std::make_shared<ModuleTag>(context));
  return kSuccess;
}

Result api::module_get_function(Function* function, Module module, const char* name) {
  RINGCOMM_GET(Context, context, require_context(&context));
  const std::shared_ptr<ModuleTag> found = Handles<ModuleTag>::all().find(module);
  if (found == nullptr) return kInvalidHandle;
  const Kernel* kernel = kFunction.name == std::string_view(name) ? &kFunction : find_kernel(name);
  if (kernel == nullptr) kernel = find_probe_kernel(name);
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

Result api::func_set_attribute(Function function, int attribute, int value) {
  RINGCOMM_TRY(require_context());
  if (Handles<FunctionTag>::all().find(function) == nullptr) return kInvalidHandle;
  const bool is_known = attribute == kMaxDynamicSharedBytes;
  const bool fits = value >= 0 && static_cast<std::size_t>(value) <= kMaxBlockSharedBytes;
  return is_known && fits ? kSuccess : kInvalidValue;
}

Result api::occupancy_max_active_clusters(int* num_clusters, Function function,
                                          const LaunchConfig* config) {
  const unsigned cluster_blocks = cluster_blocks_of(*config);
  if (cluster_blocks == 0) return kInvalidValue;
  RINGCOMM_TRY(require_context());
  if (Handles<FunctionTag>::all().find(function) == nullptr) return kInvalidHandle;
  const int per_sm = blocks_per_sm(config->block[0], config->shared_bytes);
  *num_clusters = settings().num_sms * per_sm / static_cast<int>(cluster_blocks);
  return kSuccess;
}

Result api::launch_kernel(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared_bytes, StreamHandle handle, void** parameters,
                          void** extra) {
  const LaunchConfig config = {
      {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, handle, nullptr, 0};
  return launch_kernel_ex(&config, function, parameters, extra);
}

Result api::launch_kernel_ex(const LaunchConfig* config, Function function, void** parameters,
                             void** extra) {
  RINGCOMM_GET(std::shared_ptr<StreamTag>, stream, find_stream(config->stream, &stream));
  const std::shared_ptr<FunctionTag> found = Handles<FunctionTag>::all().find(function);
  if (found == nullptr || found->context != stream->context) return kInvalidHandle;
  const unsigned cluster_blocks = cluster_blocks_of(*config);
  if (config->grid[1] != 1 || config->grid[2] != 1 || config->block[2] != 1 ||
      (config->block[1] != 1 && cluster_blocks != 1))
    return kNotSupported;
  const int per_sm = blocks_per_sm(config->block[0] * config->block[1], config->shared_bytes);
  const auto num_resident = static_cast<unsigned>(settings().num_real_sms * per_sm);
  if (config->grid[0] == 0 || extra != nullptr || cluster_blocks == 0 ||
      num_resident < cluster_blocks)
    return kInvalidValue;
  const Kernel& kernel = *found->kernel;
  const auto real_threads = static_cast<unsigned>(settings().threads_per_block);
  Grid grid{.kernel = &kernel,
            .context = stream->context,
            .num_blocks = config->grid[0],
            .num_resident = num_resident,
            .slots_per_block = settings().blocks_per_sm / per_sm,
            .num_threads = kernel.runs_whole_blocks ? 1 : std::min(real_threads, config->block[0]),
            .cluster_blocks = cluster_blocks,
            .num_parts = kernel.runs_whole_blocks ? 1 : config->block[1],
            .block_width = config->block[0],
            .block_height = config->block[1],
            .shared_bytes = config->shared_bytes};
  grid.parameter.resize(kernel.param_bytes / sizeof(ParameterLine) + 1);
  std::memcpy(grid.parameter.data(), parameters[0], kernel.param_bytes);
  return submit(*stream, [grid = std::move(grid)] { run_grid(grid); });
}

}  // namespace ringcomm::emulator
