// The kernels of csrc/cuda/kernels by the host's compiler, but for those of cross-entropy's
// clusters, which only nvcc compiles: tests/ptx runs them.

#include <map>
#include <string_view>

#include "cuda/kernels/kernel_list.h"
#include "emulator/elements.h"
#include "emulator/host_block.h"
#include "emulator/kernel_registry.h"

namespace ringcomm::emulator {
namespace {

using namespace ringcomm::cuda;

static_assert(sizeof(HostBlock::Shared) <= BlockContext::kSharedBytes);

#define RINGCOMM_BARE(...) __VA_ARGS__
#define RINGCOMM_HOST_KERNEL(name, Call, body)                                                    \
  {#name, {#name, sizeof(Call), [](const Kernel&, const void* parameter, BlockContext& context) { \
             const auto& call = *static_cast<const Call*>(parameter);                             \
             HostBlock block(call, context, *static_cast<HostBlock::Shared*>(context.shared));    \
             RINGCOMM_BARE body(block, call);                                                     \
           }}},

const std::map<std::string_view, Kernel> kKernels = {RINGCOMM_ALL_KERNELS(RINGCOMM_HOST_KERNEL)};

}  // namespace

const Kernel* find_kernel(std::string_view name) {
  const auto found = kKernels.find(name);
  return found == kKernels.end() ? nullptr : &found->second;
}

}  // namespace ringcomm::emulator
