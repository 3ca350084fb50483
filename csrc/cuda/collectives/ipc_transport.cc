#include "cuda/collectives/ipc_transport.h"

#include <algorithm>
#include <limits>
#include <set>
#include <stdexcept>
#include <thread>

#include "collectives/call.h"

namespace ringcomm::cuda {

constexpr std::chrono::microseconds kTurnPoll{20};
constexpr std::size_t kMostPlans = 16;

std::unique_ptr<IpcTransport> IpcTransport::make(Communicator& communicator, DeviceOrdinal device,
                                                 const WaitLimits& limits,
                                                 std::function<void(const std::string&)> report) {
  const ContextGuard guard(device);
  const RelaxedCapture relaxed;  // the first call of a group may be one that is captured
  return std::unique_ptr<IpcTransport>(
      new IpcTransport(communicator, device, limits, std::move(report)));
}

IpcTransport::IpcTransport(Communicator& communicator, DeviceOrdinal device,
                           const WaitLimits& limits, std::function<void(const std::string&)> report)
    : communicator_(communicator),
      limits_(limits),
      exchange_(communicator, limits_),
      group_(std::make_unique<DeviceGroup>(exchange_, device)),
      kernels_(Kernels::of(device)),
      events_(EventPool::of(device)),
      running_(RunningKernels::of(device)),
      allocations_(exchange_, *group_),
      watch_(communicator, group_->control(), group_->words(), limits.timeout, std::move(report),
             [this] { allocations_.look(); }) {}

IpcTransport::~IpcTransport() {
  try {
    const ContextGuard guard(group_->device());
    const RelaxedCapture relaxed;
    if (communicator_.failure().has_failed()) watch_.end_waits();
    // A program must not replay graphs of the group later, but replays may be running.
    if (has_captured_) check(driver().ctx_synchronize(), "wait for the GPU");
    collectives_.synchronize();
    for (auto& [peer, messages] : messages_) messages.synchronize();
    running_.forget(this);
  } catch (const Error&) {
    // The process is ending, and the driver was unloaded before.
  }
}

void IpcTransport::plan(Collective& call) const {
  plan_algorithm(communicator_.options(), group_->staging().layout, group_->takes_turns(), call);
}

GroupFrame IpcTransport::frame() const {
  GroupFrame frame;
  frame.staging = group_->staging();
  frame.control = group_->control_on_device();
  frame.timeout_ns = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(limits_.timeout).count());
  frame.rank = communicator_.rank();
  frame.world_size = communicator_.world_size();
  return frame;
}

void IpcTransport::refuse_turns(const char* what) const {
  if (group_->takes_turns()) throw std::invalid_argument(what + group_->why_turns());
}

void IpcTransport::check_collective(const StreamPlace& place) const {
  if (place.capture == 0) return;
  refuse_turns(
      "a CUDA graph cannot capture collectives of ranks that take turns on a GPU, because each "
      "call synchronizes their hosts; ");
}

void IpcTransport::check_messages(const std::vector<P2pMessage>& messages) const {
  refuse_turns("ranks that take turns on a GPU cannot send and receive there; ");
  check_batch(messages);
}

bool IpcTransport::map(const void* data, std::size_t num_bytes) {
  communicator_.failure().rethrow_if_any();
  refuse_turns(
      "ranks that take turns on a GPU cannot use each other's buffers; use torch.empty instead: "
      "calls on it are staged; ");
  const ContextGuard guard(group_->device());
  const RelaxedCapture relaxed;
  // As in follow_peers(); the next calls map it.
  const auto all = exchange_.all_gather(std::uint8_t{running_.are_messages_over()});
  if (std::ranges::find(all, 0) != all.end()) return false;
  return allocations_.map_now(static_cast<const std::byte*>(data), num_bytes, num_calls_);
}

// A program repeats its all_reduces with the same sizes, which differ in their buffers only and are
// planned once. Other calls are planned each time, because their plans contain the buffers of all
// ranks or the values of an optimizer step.
PlannedCall& IpcTransport::plan_call(const Collective& call, const HeaderWords& words) {
  const bool is_kept = call.op == OpKind::kAllReduce;
  if (const auto found = plans_.find(words); is_kept && found != plans_.end()) {
    found->second.call.inputs[0] = static_cast<const std::byte*>(call.inputs[0]);
    found->second.call.outputs[0] = static_cast<std::byte*>(call.outputs[0]);
    found->second.call.timeout_ns = frame().timeout_ns;
    return found->second;
  }
  PlannedCall planned;
  static_cast<GroupFrame&>(planned.call) = frame();
  planned.plan = plan_launch(call, planned.call);
  planned.kernel = kernels_.find(planned.plan.kernel);
  if (!is_kept) return other_plan_ = std::move(planned);
  if (plans_.size() >= kMostPlans) plans_.clear();
  return plans_[words] = std::move(planned);
}

void IpcTransport::set_timeout(std::chrono::milliseconds timeout) {
  limits_.timeout = timeout;
  watch_.set_timeout(timeout);
}

Traffic IpcTransport::enqueue(const Collective& call, const StreamPlace& place) {
  communicator_.failure().rethrow_if_any();
  const HeaderWords words = compared_words(call, communicator_.world_size());
  PlannedCall& planned = plan_call(call, words);
  follow_peers();
  Traffic traffic = planned.plan.traffic;
  if (allocations_.find_buffers(call, planned.plan, num_calls_++, planned.call))
    ++(planned.call.lends == Lends::kYes ? traffic.num_in_place : traffic.num_staged);
  collectives_.wait(place);
  planned.call.launch = GroupFrame::kNoNumber;
  if (place.capture == 0) {
    planned.call.launch = num_launches_;
    watch_.record_call(num_launches_++, words);
  } else {
    record_capture();
  }
  const auto launching = running_.launching();
  if (group_->takes_turns())
    launch_in_turns(planned, place.stream);
  else
    kernels_.launch(planned.kernel, planned.plan, planned.call, place.stream);
  last_end_ = events_.record(place.stream);
  collectives_.remember(last_end_, place);
  if (place.capture == 0) running_.remember(this, RunningKernels::kCollective, last_end_);
  watch_.record_launch();
  return traffic;
}

// Replays are not counted, and another rank may make the same calls eagerly.
void IpcTransport::record_capture() {
  has_captured_ = true;
  group_->words().has_captured = 1;
}

// Mapping copies addresses to the device, which may have to wait behind a kernel in a queue of the
// hardware. A message there may wait for a peer that waits for this rank. Unmapping waits for all
// kernels: they must be collectives of this group, which all ranks call in the same order.
void IpcTransport::follow_peers() {
  if (!allocations_.has_news()) return;
  const RelaxedCapture relaxed;
  if (running_.are_messages_over()) allocations_.follow(num_calls_, running_.is_over_but_of(this));
}

// ---- ranks that take turns

void IpcTransport::launch_in_turns(PlannedCall& planned, StreamHandle stream) {
  const RelaxedCapture relaxed;  // another stream may be captured
  KernelCall& call = planned.call;
  if (call.num_slices == 0)  // ranks may know different sizes
    set_longest_shard(call, planned.plan, meet(longest_shard(call)));
  for (std::uint32_t turn = 0; turn < planned.plan.num_turns; ++turn) {
    call.first_step = call.last_step = turn;
    kernels_.launch(planned.kernel, planned.plan, call, stream);
    check(driver().stream_synchronize(stream), "wait for the GPU");
    meet(0);
  }
}

// Waits for the hosts of all ranks. Returns the largest value of any.
std::uint64_t IpcTransport::meet(std::uint64_t value) {
  GroupWords& words = group_->words();
  GroupWords::OfRank& mine = words.ranks[communicator_.rank()];
  const std::uint64_t turn = mine.num_turns + 1;
  mine.turn_values[turn % 2] = value;
  mine.num_turns = turn;
  const auto deadline = deadline_after(limits_.timeout);
  for (int peer = 0; peer < communicator_.world_size(); ++peer) {
    const GroupWords::OfRank& theirs = words.ranks[peer];
    const auto has_come = [&] { return theirs.num_turns >= turn; };
    while (!has_come()) {
      look_at_peer(peer, deadline, has_come);
      std::this_thread::sleep_for(kTurnPoll);
    }
    value = std::max(value, theirs.turn_values[turn % 2]);
  }
  return value;
}

// Throws if the rank that this host waits for cannot arrive. A rank may arrive and then leave, so
// whether it has is read after its state.
void IpcTransport::look_at_peer(int peer, RunningClock::time_point deadline,
                                const std::function<bool()>& has_come) {
  communicator_.failure().rethrow_if_any();
  const WaitStatus state = communicator_.group_state()->state_of(peer);
  const bool is_late = RunningClock::now() >= deadline;
  if ((state != WaitStatus::kNone || is_late) && !has_come())
    communicator_.failure().raise_stopped(state != WaitStatus::kNone ? state : WaitStatus::kTimeout,
                                          peer, watch_.last_activity());
}

// ---- messages

unsigned IpcTransport::places_of_messages(int peer) {
  const auto deadline = deadline_after(limits_.timeout);
  return group_->places_of_messages(
      peer, [&](const std::function<bool()>& has_come) { look_at_peer(peer, deadline, has_come); });
}

bool IpcTransport::has_room_for_messages(int peer) { return places_of_messages(peer) > 0; }

void IpcTransport::exchange(const std::vector<P2pMessage>& messages, const StreamPlace& place) {
  if (messages.empty()) return;
  communicator_.failure().rethrow_if_any();
  P2pCall call;
  static_cast<GroupFrame&>(call) = frame();
  std::set<int> peers;
  for (const P2pMessage& message : messages) peers.insert(message.peer);
  unsigned places_per_lane = std::numeric_limits<unsigned>::max();
  for (const int peer : peers)
    places_per_lane = std::min(places_per_lane, places_of_messages(peer));
  const LaunchPlan plan = plan_exchange(messages, places_per_lane, call);
  if (place.capture != 0) record_capture();
  for (const int peer : peers) messages_[peer].wait(place);
  const auto launching = running_.launching();
  kernels_.launch(kernels_.find(plan.kernel), plan, call, place.stream);
  last_end_ = events_.record(place.stream);
  for (const int peer : peers) {
    messages_[peer].remember(last_end_, place);
    if (place.capture == 0) running_.remember(this, peer, last_end_);
  }
  for (const P2pMessage& message : messages)
    communicator_.stats().count(message.is_send ? OpKind::kSend : OpKind::kRecv,
                                {.sent_bytes = message.is_send ? message.num_bytes : 0});
  watch_.record_launch();
}

}  // namespace ringcomm::cuda
