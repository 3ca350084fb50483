#include "cuda/collectives/ipc_transport.h"

#include <algorithm>
#include <set>
#include <stdexcept>

namespace ringcomm::cuda {

constexpr std::size_t kMostPlans = 16;
constexpr std::uint64_t kAnyCall = ~std::uint64_t{0};

IpcTransport::IpcTransport(Communicator& communicator, DeviceOrdinal device,
                           const WaitLimits& limits, std::function<void(const std::string&)> report,
                           const std::function<std::unique_ptr<DeviceTransport>()>& make_sums)
    : communicator_(communicator),
      limits_(limits),
      exchange_(communicator, limits_),
      group_(std::make_unique<DeviceGroup>(exchange_, device)),
      kernels_(Kernels::of(device)),
      events_(EventPool::of(device)),
      running_(RunningKernels::of(device)),
      allocations_(exchange_, *group_),
      sums_(group_->facts().has_switches ? make_sums() : nullptr),
      watch_(
          communicator, group_->control(), group_->words(), limits.timeout,
          [this, report = std::move(report)](const std::string& error) {
            if (sums_ != nullptr) sums_->abort();
            report(error);
          },
          [this] { allocations_.look(); }) {}

IpcTransport::~IpcTransport() {
  try_in_context(group_->device(), [this] {
    if (communicator_.failure().has_failed()) abort();
    // A program must not replay graphs of the group later, but replays may be running.
    if (has_captured_) check(driver().ctx_synchronize(), "wait for the GPU");
    running_.end(this);
  });
}

// A graph's calls stay with the kernels: NCCL's abort would wait for its end. So do integers, and
// averages, which switches do not have.
void IpcTransport::plan(Collective& call, bool is_captured) const {
  if (sums_ != nullptr && !is_captured && call.op == OpKind::kAllReduce &&
      call.reduction == Reduction::kSum && call.dtype >= DType::kFloat16 &&
      call.num_bytes() >= kLeastSwitchBytes && call.algorithm == Algorithm::kAuto)
    return sums_->plan(call, is_captured);
  plan_algorithm(communicator_.options(), group_->staging().layout, call);
}

GroupFrame IpcTransport::frame() const {
  GroupFrame frame;
  frame.staging = group_->staging();
  frame.control = group_->control_on_device();
  frame.bases = allocations_.bases();
  frame.timeout_ns = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(limits_.timeout).count());
  frame.rank = communicator_.rank();
  frame.world_size = communicator_.world_size();
  return frame;
}

void IpcTransport::check_messages(const std::vector<P2pMessage>& messages) const {
  if (!has_room_for_messages(group_->facts()))
    throw std::invalid_argument(
        "the GPU has no room for kernels that wait for messages of so many ranks; use all_to_all, "
        "or a group of fewer ranks on a GPU");
  if (messages.size() > P2pCall::kMaxMessages)
    throw std::invalid_argument("a batch of sends and receives on a GPU must have at most " +
                                std::to_string(P2pCall::kMaxMessages) + ", got " +
                                std::to_string(messages.size()) + "; split it");
}

bool IpcTransport::map(const void* data, std::size_t num_bytes) {
  communicator_.failure().rethrow_if_any();
  const ContextGuard guard(group_->device());
  const RelaxedCapture relaxed;
  // As in follow_peers(); the next calls map it.
  const auto all = exchange_.all_gather(std::uint8_t{running_.are_messages_over()});
  if (std::ranges::find(all, 0) != all.end()) return false;
  return allocations_.map_now(static_cast<const std::byte*>(data), num_bytes, num_calls_);
}

// A program repeats its small all_reduces with the same sizes, which differ in their buffers only
// and are planned once. Other calls are planned each time, because their plans contain the buffers
// of all ranks or the values of an optimizer step.
PlannedCall& IpcTransport::plan_call(const Collective& call, const HeaderWords& words) {
  if (const auto found = plans_.find(words); found != plans_.end()) {
    found->second.call.inputs[0] = static_cast<const std::byte*>(call.inputs[0]);
    found->second.call.outputs[0] = static_cast<std::byte*>(call.outputs[0]);
    found->second.call.timeout_ns = frame().timeout_ns;
    return found->second;
  }
  PlannedCall planned;
  static_cast<GroupFrame&>(planned.call) = frame();
  planned.plan = plan_launch(call, group_->facts().min_multiprocessors, planned.call);
  if (call.op != OpKind::kAllReduce || planned.plan.kind != LaunchKind::kPackets)
    return other_plan_ = std::move(planned);
  if (plans_.size() >= kMostPlans) plans_.clear();
  return plans_[words] = std::move(planned);
}

void IpcTransport::set_timeout(std::chrono::milliseconds timeout) {
  limits_.timeout = timeout;
  watch_.set_timeout(timeout);
  if (sums_ != nullptr) sums_->set_timeout(timeout);
}

Traffic IpcTransport::enqueue(const Collective& call, const StreamContext& stream) {
  communicator_.failure().rethrow_if_any();
  const HeaderWords words = compared_words(call, communicator_.world_size());
  follow_peers();
  running_.wait(this, RunningKernels::kCollective, stream);
  std::uint64_t number = GroupFrame::kNoNumber;
  if (stream.capture == 0)
    watch_.record_call(number = num_launches_++, words);
  else
    group_->words().has_captured = has_captured_ = true;
  Traffic traffic = launch(call, words, number, stream);
  if (call.op == OpKind::kAllReduce && call.algorithm == Algorithm::kDirect)
    traffic = sums_->enqueue(call, stream);  // behind the rendezvous
  ++num_calls_;
  last_end_ = events_.record(stream.handle);
  running_.remember(this, RunningKernels::kCollective, last_end_, stream);
  watch_.record_launch();
  return traffic;
}

Traffic IpcTransport::launch(const Collective& call, const HeaderWords& words, std::uint64_t number,
                             const StreamContext& stream) {
  PlannedCall& planned = plan_call(call, words);
  planned.call.launch = number;
  Traffic traffic = planned.plan.traffic;
  const auto launching = running_.launching();
  if (planned.plan.kind == LaunchKind::kPackets) {
    kernels_.launch(planned.plan.kernel, planned.plan.num_blocks, planned.call, stream.handle);
  } else if (planned.plan.kind == LaunchKind::kShards) {
    launch_shards(call, planned.call, stream.handle, traffic);
  } else {
    InPlaceLaunch in_place(call, planned.plan, planned.call);
    std::optional<RelaxedCapture> relaxed;  // the driver is asked about buffers
    if (stream.capture != 0) relaxed.emplace();
    allocations_.find_places(num_calls_, in_place.buffers());
    traffic.copied_bytes = in_place.staged_bytes();
    if (planned.plan.kind == LaunchKind::kInPlace)
      ++(traffic.copied_bytes > 0 ? traffic.num_staged : traffic.num_in_place);
    in_place.run([&](std::string_view kernel, unsigned num_blocks, KernelCall& kernel_call) {
      kernels_.launch(kernel, num_blocks, kernel_call, stream.handle);
    });
  }
  return traffic;
}

// Mapping copies addresses to the device, which may have to wait behind a kernel in a queue of the
// hardware. A message there may wait for a peer that waits for this rank. Unmapping waits for all
// kernels: they must be collectives of this group, which all ranks call in the same order.
void IpcTransport::follow_peers() {
  if (!allocations_.has_news()) return;
  const RelaxedCapture relaxed;
  if (running_.are_messages_over()) allocations_.follow(num_calls_, running_.is_over_but_of(this));
}

// ---- messages

// Adds a message to what a call of this rank moves: a long one is in place, or in slots.
static void add_message(const P2pMessage& message, const P2pCall& call, Traffic& traffic) {
  if (!message.is_send || !call.is_long(message)) return;
  if (message.place == 0) traffic.copied_bytes += message.num_bytes;
  traffic.num_staged = traffic.copied_bytes > 0 ? 1 : 0;
  traffic.num_in_place = 1 - traffic.num_staged;
}

void IpcTransport::launch_messages(std::vector<P2pMessage>& messages, P2pCall& call,
                                   StreamHandle stream) {
  std::vector<PeerBuffer> buffers;
  for (const P2pMessage& message : messages)
    buffers.push_back({message.data, message.is_send && call.is_long(message) && !call.is_in_place
                                         ? message.num_bytes
                                         : 0});
  // No message of a peer was under way when that mapped an allocation, so its kernels that read a
  // message are launched later.
  allocations_.find_places(call.use == LinkUse::kShards ? num_calls_ : kAnyCall, buffers);
  for (std::size_t i = 0; i < messages.size(); ++i) messages[i].place = buffers[i].place;
  const StagingLayout& layout = call.staging.layout;
  for (std::vector<P2pMessage> left = messages; take_launch(left, call);) {
    const unsigned num_blocks = std::min((call.num_channels + 1) / 2, layout.num_blocks);
    kernels_.launch("ringcomm_open_messages", num_blocks, call, stream);
    if (!call.has_long) continue;
    std::uint64_t longest = 0;
    for (unsigned m = 0; m < call.first_of_channel[call.num_channels]; ++m)
      if (!call.messages[m].is_send) longest = std::max(longest, call.messages[m].num_bytes);
    if (longest > 0)
      kernels_.launch("ringcomm_copy_messages",
                      plain_blocks(longest, group_->facts().min_multiprocessors), call, stream);
    kernels_.launch("ringcomm_close_messages", num_blocks, call, stream);
  }
}

void IpcTransport::launch_shards(const Collective& call, const KernelCall& kernel_call,
                                 StreamHandle stream, Traffic& traffic) {
  P2pCall messages;
  static_cast<GroupFrame&>(messages) = kernel_call;
  messages.use = LinkUse::kShards;
  messages.is_in_place = writes_inputs(call, kernel_call);
  const int own = kernel_call.rank;
  if (kernel_call.output_bytes[own] > 0 && kernel_call.outputs[own] != kernel_call.inputs[own])
    check(driver().memcpy_async(reinterpret_cast<DevicePtr>(kernel_call.outputs[own]),
                                reinterpret_cast<DevicePtr>(kernel_call.inputs[own]),
                                kernel_call.output_bytes[own], stream),
          "copy a shard");
  std::vector<P2pMessage> shards = shards_of(call, kernel_call);
  launch_messages(shards, messages, stream);
  for (const P2pMessage& shard : shards) add_message(shard, messages, traffic);
}

void IpcTransport::exchange(std::vector<P2pMessage> messages, const StreamContext& stream) {
  if (messages.empty()) return;
  communicator_.failure().rethrow_if_any();
  follow_peers();
  P2pCall call;
  static_cast<GroupFrame&>(call) = frame();
  std::set<int> peers;
  for (const P2pMessage& message : messages) peers.insert(message.peer);
  if (stream.capture != 0) group_->words().has_captured = has_captured_ = true;
  for (const int peer : peers) running_.wait(this, peer, stream);
  const auto launching = running_.launching();
  launch_messages(messages, call, stream.handle);
  last_end_ = events_.record(stream.handle);
  for (const int peer : peers) running_.remember(this, peer, last_end_, stream);
  for (const P2pMessage& message : messages) {
    Traffic traffic{.sent_bytes = message.is_send ? message.num_bytes : 0};
    add_message(message, call, traffic);
    communicator_.stats().count(message.is_send ? OpKind::kSend : OpKind::kRecv, traffic);
  }
  watch_.record_launch();
}

}  // namespace ringcomm::cuda
