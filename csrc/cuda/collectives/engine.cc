#include "cuda/collectives/engine.h"

#include <algorithm>
#include <limits>
#include <set>
#include <stdexcept>
#include <thread>

#include "collectives/collective.h"
#include "cuda/collectives/header_words.h"

namespace ringcomm::cuda {
namespace {

constexpr std::chrono::microseconds kTurnPoll{20};

}  // namespace

std::unique_ptr<Engine> Engine::make(Communicator& communicator, DeviceOrdinal device,
                                     const WaitLimits& limits,
                                     std::function<void(const std::string&)> report) {
  const ContextGuard guard(device);
  const RelaxedCapture relaxed;  // the first call of a group may be one that is captured
  return std::unique_ptr<Engine>(new Engine(communicator, device, limits, std::move(report)));
}

Engine::Engine(Communicator& communicator, DeviceOrdinal device, const WaitLimits& limits,
               std::function<void(const std::string&)> report)
    : communicator_(communicator),
      limits_(limits),
      exchange_(communicator, limits_),
      group_(std::make_shared<DeviceGroup>(
          exchange_, device,
          CallBoard::num_bytes(communicator.world_size()) + LentMemory::num_bytes())),
      kernels_(Kernels::of(device)),
      events_(EventPool::of(device)),
      plans_(kernels_, frame()),
      calls_(group_->host_memory(), communicator.rank()),
      lent_(exchange_, *group_,
            group_->host_memory() + CallBoard::num_bytes(communicator.world_size())),
      turns_(group_->takes_turns() ? std::make_shared<TurnEvents>(exchange_, group_->leaving())
                                   : nullptr),
      watch_({.control = group_->control(),
              .calls = calls_,
              .members = *communicator.members(),
              .failure = communicator.failure(),
              .rank = communicator.rank(),
              .world_size = communicator.world_size(),
              .find_dead_turn = [this] { return find_dead_turn(); },
              .timeout = limits.timeout},
             std::move(report)) {}

Engine::~Engine() {
  try {
    if (is_stuck()) {
      // Streams may hold work that uses these objects and never runs, so they are leaked until the
      // process ends.
      new auto(group_);
      new auto(turns_);
      return;
    }
    const ContextGuard guard(group_->device());
    const RelaxedCapture relaxed;
    if (communicator_.failure().has_failed()) watch_.end_waits();
    // Captured work may run later; the program must not replay it.
    collectives_.synchronize();
    for (auto& [peer, messages] : messages_) messages.synchronize();
  } catch (const Error&) {
    // The process is ending, and the driver was unloaded before.
  }
}

void Engine::plan(const Collective& call, CallHeader& header) const {
  plan_header(call, communicator_.options(), group_->staging().layout, group_->takes_turns(),
              header);
}

void Engine::check_alive() { communicator_.failure().rethrow_if_any(); }

GroupFrame Engine::frame() const {
  GroupFrame frame;
  frame.staging = group_->staging();
  frame.control = group_->control_on_device();
  frame.timeout_ns = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(limits_.timeout).count());
  frame.rank = communicator_.rank();
  frame.world_size = communicator_.world_size();
  return frame;
}

void Engine::check_collective(const StreamPlace& place) const {
  if (turns_ != nullptr && place.capture != 0)
    throw std::invalid_argument(
        "a CUDA graph cannot capture collectives of ranks that take turns on a GPU, because each "
        "call synchronizes their hosts; " +
        group_->why_turns());
}

void Engine::check_messages(const std::vector<Mail>& messages) const {
  if (turns_ != nullptr)
    throw std::invalid_argument("ranks that take turns on a GPU cannot send and receive there; " +
                                group_->why_turns());
  check_batch(messages);
}

std::shared_ptr<const Loan> Engine::lend(std::size_t num_bytes) {
  check_alive();
  if (turns_ != nullptr)
    throw std::invalid_argument(
        "ranks that take turns on a GPU cannot use each other's buffers; use "
        "torch.empty instead: calls on it are staged; " +
        group_->why_turns());
  const ContextGuard guard(group_->device());
  const RelaxedCapture relaxed;
  return lent_.lend(num_bytes);
}

std::shared_ptr<const Loan> Engine::borrow(std::size_t num_bytes, const StreamPlace& place) {
  check_alive();
  const RelaxedCapture relaxed;
  return lent_.borrow(num_bytes, place);
}

Traffic Engine::enqueue(const Collective& call, const CallHeader& header,
                        const StreamPlace& place) {
  check_alive();
  PlannedCall& planned = plans_.plan(call, header);
  lent_.collect();
  lent_.find_buffers(call, planned.plan, place.capture != 0, planned.call);
  collectives_.wait(place);
  planned.call.launch = GroupFrame::kNoNumber;
  if (place.capture == 0) {
    planned.call.launch = num_launches_;
    calls_.note(num_launches_++, planned.header);
  }
  if (turns_ != nullptr)
    launch_in_turns(planned, place.stream);
  else
    kernels_.launch(planned.kernel, planned.plan.num_blocks, planned.call, place.stream);
  last_end_ = events_.record(place.stream);
  collectives_.note(last_end_, place);
  watch_.note_launch();
  return planned.plan.traffic;
}

// ---- ranks that take turns

void Engine::launch_in_turns(PlannedCall& planned, StreamHandle stream) {
  const LaunchPlan& plan = planned.plan;
  KernelCall& call = planned.call;
  std::uint32_t num_launches = plan.num_turns;
  if (call.longest_bytes == KernelCall::kUnknown) {
    // The hosts synchronize in each turn anyway, and here exchange the longest share that each
    // knows.
    std::uint64_t longest_bytes = 0;
    for (int rank = 0; rank < call.world_size; ++rank)
      longest_bytes = std::max({longest_bytes, call.input_bytes[rank], call.output_bytes[rank]});
    take_turn(stream, longest_bytes);
    for (int rank = 0; rank < call.world_size; ++rank)
      longest_bytes = std::max(longest_bytes, calls_.turn_value(rank, num_turns_));
    call.longest_bytes = longest_bytes;
    num_launches = turns_of_move(call.staging.layout, longest_bytes, plan.num_blocks,
                                 plan.kernel == "ringcomm_move_same");
  }
  for (std::uint32_t turn = 0; turn < num_launches; ++turn) {
    call.first_step = call.last_step = turn;
    kernels_.launch(planned.kernel, plan.num_blocks, call, stream);
    take_turn(stream, 0);
  }
}

// Work that a rank enqueues before the end of its turn runs before work that any rank enqueues
// after it.
//
// An event of turn n is recorded again in turn n + 2, after all peers have ended turn n + 1 on
// their hosts. So a peer's stream that waits for turn n waits for the right recording.
void Engine::take_turn(StreamHandle stream, std::uint64_t value) {
  const std::uint64_t turn = ++num_turns_;
  turns_->record(turn, stream);
  calls_.finish_turn(turn, value);
  wait_for_turn(turn);
  turns_->block(turn, stream);
}

int Engine::find_dead_turn() const {
  if (turns_ == nullptr) return -1;
  for (int peer = 0; peer < communicator_.world_size(); ++peer) {
    if (peer == communicator_.rank() || !communicator_.members()->has_died(peer)) continue;
    const ContextGuard guard(group_->device());
    const RelaxedCapture relaxed;
    if (!turns_->are_over(peer)) return peer;
  }
  return -1;
}

void Engine::wait_for_turn(std::uint64_t turn) {
  const auto deadline = deadline_after(limits_.timeout);
  for (int peer = 0; peer < communicator_.world_size(); ++peer) {
    while (calls_.num_turns(peer) < turn) {
      look_at_peer(peer, deadline);
      std::this_thread::sleep_for(kTurnPoll);
    }
  }
}

// Throws if the rank that this host waits for cannot arrive.
void Engine::look_at_peer(int peer, std::chrono::steady_clock::time_point deadline) {
  check_alive();
  const Stop state = communicator_.members()->state_of(peer);
  const bool is_late = std::chrono::steady_clock::now() >= deadline;
  if (state != Stop::kNone || is_late)
    communicator_.failure().raise_stopped(
        state != Stop::kNone ? state : Stop::kTimeout, peer,
        watch_.activity_of(num_launches_ > 0 ? num_launches_ - 1 : 0));
}

// ---- messages

unsigned Engine::blocks_of_messages(int peer) {
  const auto deadline = deadline_after(limits_.timeout);
  return group_->mail_room().blocks_with(peer, [&] { look_at_peer(peer, deadline); });
}

bool Engine::has_room_for_messages(int peer) { return blocks_of_messages(peer) > 0; }

void Engine::exchange(const std::vector<Mail>& messages, const StreamPlace& place) {
  if (messages.empty()) return;
  check_alive();
  MailCall call;
  static_cast<GroupFrame&>(call) = frame();
  std::set<int> peers;
  for (const Mail& mail : messages) peers.insert(mail.peer);
  unsigned blocks_per_lane = std::numeric_limits<unsigned>::max();
  for (const int peer : peers)
    blocks_per_lane = std::min(blocks_per_lane, blocks_of_messages(peer));
  const LaunchPlan plan = plan_exchange(messages, blocks_per_lane, call);
  if (place.capture != 0)
    for (const Mail& mail : messages) lent_.keep_for_graph(mail.data);
  for (const int peer : peers) messages_[peer].wait(place);
  kernels_.launch(kernels_.find(plan.kernel), plan.num_blocks, call, place.stream);
  last_end_ = events_.record(place.stream);
  for (const int peer : peers) messages_[peer].note(last_end_, place);
  for (const Mail& mail : messages)
    communicator_.count(mail.is_send ? OpKind::kSend : OpKind::kRecv,
                        {.sent_bytes = mail.is_send ? mail.num_bytes : 0});
  watch_.note_launch();
}

}  // namespace ringcomm::cuda
