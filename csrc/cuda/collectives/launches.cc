#include "cuda/collectives/launches.h"

#include <algorithm>

#include "core/errors.h"
#include "cuda/kernels/kernel_list.h"

RINGCOMM_EMBED(collective_kernels)
RINGCOMM_EMBED(update_kernels)

namespace ringcomm::cuda {

// The driver loads a function at its first use and may then wait for the GPU, perhaps for a kernel
// that waits for the one to be loaded: a deadlock. So all functions are loaded here.
Kernels::Kernels(DeviceOrdinal device) {
  const ContextGuard guard(device);
  const RelaxedCapture relaxed;
  const std::vector<Module> modules =
      load_kernels({RINGCOMM_IMAGE(collective_kernels), RINGCOMM_IMAGE(update_kernels)});
  if (modules.empty())
    throw Error(
        {.kind = ErrorKind::kSystem},
        "ringcomm: this build has no kernels for GPUs; put CUDA's nvcc on PATH and build them: "
        "RINGCOMM_CUDA=1 pip install --no-build-isolation --force-reinstall --no-deps .");
#define RINGCOMM_KERNEL_NAME(name, Call, body) #name,
  for (const char* name : {RINGCOMM_ALL_KERNELS(RINGCOMM_KERNEL_NAME)})
    if (const Function kernel = find_kernel(modules, name)) functions_[name] = kernel;
#undef RINGCOMM_KERNEL_NAME
}

void Kernels::launch(std::string_view name, unsigned num_blocks, GroupFrame& call,
                     StreamHandle stream) const {
  const auto found = functions_.find(name);
  if (found == functions_.end())
    throw Error({.kind = ErrorKind::kSystem}, "ringcomm: there is no kernel " + std::string(name));
  void* parameters[] = {&call};
  check(driver().launch_kernel(found->second, num_blocks, 1, 1, kBlockThreads, 1, 1, 0, stream,
                               parameters, nullptr),
        "launch a kernel");
}

// ---- calls in place

InPlaceLaunch::InPlaceLaunch(const Collective& call, const LaunchPlan& plan,
                             KernelCall& kernel_call)
    : plan_(plan),
      call_(kernel_call),
      lends_inputs_(!writes_inputs(call, kernel_call)),
      buffers_(2 * static_cast<std::size_t>(kernel_call.world_size)) {
  call_.piece_size = plan.piece_size;
  if (plan.kind == LaunchKind::kRing) return;
  for (std::size_t rank = 0; rank < num_parts(); ++rank) {
    if (static_cast<int>(rank) != call_.rank)  // its own input a rank reads where it is
      buffers_[rank] = {call_.inputs[rank], call_.input_bytes[rank]};
    if (call_.num_outputs > 1)
      buffers_[num_parts() + rank] = {call_.outputs[rank], call_.output_bytes[rank]};
  }
}

// All of one half of the buffers, or none.
std::uint64_t InPlaceLaunch::staged_bytes(std::size_t first) const {
  bool is_staged = first == 0 && !lends_inputs_;
  std::uint64_t num_bytes = 0;
  const std::byte* last = nullptr;  // all may have the same input
  for (std::size_t idx = first; idx < first + num_parts(); ++idx) {
    const PeerBuffer& buffer = buffers_[idx];
    if (buffer.num_bytes == 0 || buffer.data == last) continue;
    is_staged = is_staged || buffer.place == 0;
    num_bytes += buffer.num_bytes;
    last = buffer.data;
  }
  return is_staged ? num_bytes : 0;
}

Place InPlaceLaunch::place_of(std::size_t idx, bool is_staged, std::uint64_t in_scratch,
                              std::size_t unit) const {
  const std::uint64_t begin = call_.piece_begin * unit;
  if (buffers_[idx].num_bytes <= begin) return 0;
  return is_staged ? place_in_scratch(in_scratch) : buffers_[idx].place + begin;
}

void InPlaceLaunch::run(const Launch& launch) {
  const bool stages_inputs = call_.stages_inputs = staged_bytes(0) > 0;
  const bool stages_outputs = call_.stages_outputs = staged_bytes(num_parts()) > 0;
  for (unsigned piece = 0; piece < plan_.num_pieces; ++piece) {
    call_.piece_begin = piece * plan_.piece_size;
    for (std::size_t rank = 0; rank < num_parts(); ++rank) {
      call_.input_places[rank] =
          place_of(rank, stages_inputs, rank * plan_.input_stride, call_.input_unit);
      call_.output_places[rank] =
          place_of(num_parts() + rank, stages_outputs,
                   plan_.outputs_offset + rank * plan_.output_stride, call_.output_unit);
    }
    if (stages_inputs || stages_outputs) launch("ringcomm_copy_in", plan_.copy_blocks, call_);
    launch("ringcomm_open", 1, call_);
    launch(plan_.kernel, plan_.num_blocks, call_);
    launch("ringcomm_close", 1, call_);
    if (stages_outputs) launch("ringcomm_copy_out", plan_.copy_blocks, call_);
  }
}

// ---- messages

bool take_launch(std::vector<P2pMessage>& messages, P2pCall& call) {
  if (messages.empty()) return false;
  const auto channel_of = [](const P2pMessage& message) {  // to one rank, or from one
    return 2 * message.peer + (message.is_send ? 0 : 1);
  };
  std::ranges::stable_sort(messages, {}, channel_of);
  std::vector<P2pMessage> later;
  std::uint8_t num = 0;
  call.num_channels = 0;
  call.has_long = false;
  int channel = -1;
  unsigned num_long = 0;  // of the channel
  for (const P2pMessage& message : messages) {
    if (channel_of(message) != channel) {
      channel = channel_of(message);
      num_long = 0;
      call.first_of_channel[call.num_channels++] = num;
    }
    num_long += call.is_long(message) ? 1 : 0;
    if (num_long > LinkWords::kMostLong) {
      later.push_back(message);
      continue;
    }
    call.has_long = call.has_long || num_long > 0;
    call.messages[num++] = message;
  }
  call.first_of_channel[call.num_channels] = num;
  messages = std::move(later);
  return true;
}

std::vector<P2pMessage> shards_of(const Collective& call, const KernelCall& kernel_call) {
  std::vector<P2pMessage> messages;
  const int own = kernel_call.rank;
  // What identifies the call, without sizes.
  const auto tag = static_cast<std::int32_t>(kernel_call.header_digest >> 33);
  for (int peer = 0; peer < kernel_call.world_size; ++peer) {
    if (peer == own) continue;
    const auto peer_idx = static_cast<std::int16_t>(peer);
    if (part_given(call, own, peer))
      messages.push_back({const_cast<std::byte*>(kernel_call.inputs[peer]),
                          kernel_call.input_bytes[peer], tag, peer_idx, true});
    if (part_taken(call, own, peer))
      messages.push_back(
          {kernel_call.outputs[peer], kernel_call.output_bytes[peer], tag, peer_idx, false});
  }
  return messages;
}

}  // namespace ringcomm::cuda
