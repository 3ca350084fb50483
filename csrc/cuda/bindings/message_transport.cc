#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "bindings/python_errors.h"
#include "collectives/fused_update.h"
#include "core/arch.h"
#include "cuda/bindings/device_transports.h"
#include "cuda/collectives/launches.h"
#include "host/group_state.h"
#include "host/threads.h"
#include "host/wait.h"
#include "kernels/cuda_device.h"

namespace ringcomm {
namespace {

// Reports of ranks on other hosts are in the store, which all ranks poll.
constexpr int kLooksPerQuestion = 4;
// Each slice costs a batch of messages and the launch of a sum.
constexpr std::size_t kRingSliceBytes = std::size_t{4} << 20;

// As what NCCL reduces it; Undefined where it does not.
at::ScalarType type_of(const Collective& call) {
  using enum at::ScalarType;
  constexpr at::ScalarType kTypes[] = {Byte, Bool,     Byte,      Char,      Undefined,
                                       Int,  Long,     Undefined, Undefined, Undefined,
                                       Half, BFloat16, Float,     Double,    Undefined};
  static_assert(std::size(kTypes) == kNumDTypes);
  return kTypes[static_cast<std::size_t>(call.dtype)];
}

c10d::ReduceOp reduction_of(const Collective& call) {
  static_assert(static_cast<int>(c10d::ReduceOp::MAX) == static_cast<int>(Reduction::kMax));
  return static_cast<c10d::ReduceOp::RedOpType>(call.reduction);
}

// Throws Error, NotImplementedError where the device has none.
const cuda::Kernels& update_kernels(c10::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(has_driver_for(device),
                              "ringcomm: there are no kernels of optimizers for ", device);
  return cuda::Kernels::of(device.index());
}

// Calls on device tensors by another backend of torch.distributed: by its collectives, and by a
// ring over its sends and receives where the user has named that.
//
// Requirements for the backend: operations start after the work of the current stream at the call,
// in the order of the calls. Work::wait() makes the current stream wait, not the host. Sends and
// receives between startCoalescing() and endCoalescing() progress together; without coalescing none
// may wait for another. Shards of alltoall, allgather and reduce_scatter may differ in size and be
// empty. Its abort() ends all of them.
class MessageDeviceTransport final : public cuda::DeviceTransport {
 public:
  // `backend` is for this group alone; null in a group of one.
  MessageDeviceTransport(c10::intrusive_ptr<c10d::Backend> backend, Communicator& communicator,
                         const GroupOptions& options, c10::Device device)
      : backend_(std::move(backend)),
        communicator_(communicator),
        options_(options.engine),
        rank_(communicator.rank()),
        world_size_(communicator.world_size()),
        device_(device),
        timeout_(std::min(options.timeout, kLongestTimeout)) {
    if (backend_ == nullptr) return;
    description_ = "messages over " + backend_->getBackendName();
    watch_.emplace(WatchThread::Pace{.interval = kCheckInterval, .num_looks = 0},
                   [this] { return look_at_peers(); });
  }

  ~MessageDeviceTransport() override {
    // The backend ends before the memory that its calls may still use.
    without_gil([&] {
      watch_.reset();
      if (backend_ != nullptr && !is_aborted_) error_of([&] { backend_->shutdown(); });
      backend_.reset();
    });
  }

  // Uses what NCCL connects at its first use, when it blocks the host. Collective. With `sum_bytes`
  // sums only, in which no kernel of other calls finds out that a rank has died.
  void connect(std::size_t sum_bytes) {
    if (backend_ == nullptr) return;
    sum_bytes > 0 ? watch_->stay_awake() : watch(std::nullopt, false);
    const auto num_bytes = std::max(sum_bytes, 2 * static_cast<std::size_t>(world_size_));
    const at::Tensor all = new_array(num_bytes, at::kByte).zero_();
    std::vector<at::Tensor> one{sum_bytes > 0 ? all.view(at::kFloat) : all};
    wait(backend().allreduce(one));
    if (sum_bytes > 0) return;
    const auto places = all.chunk(2);
    std::vector<at::Tensor> from = places[0].split(1), to = places[1].split(1);
    wait(backend().alltoall(to, from));
    wait(backend().broadcast(one));
  }

  const std::string& description() const override { return description_; }

  void plan(Collective& call, bool) const override {
    if (call.op == OpKind::kReduceUpdateGather) update_kernels(device_);  // or throws
    if (call.algorithm == Algorithm::kAuto) call.algorithm = options_.algorithm;
    const bool is_ring =
        world_size_ > 1 && call.op == OpKind::kAllReduce && call.algorithm == Algorithm::kRing;
    call.algorithm = is_ring ? Algorithm::kRing : Algorithm::kDirect;
    if (world_size_ == 1 || !is_reduction(call.op)) return;
    const auto refuse = [&](const std::string& what, const char* why) {
      throw std::invalid_argument(what + " on " + device_.str() + ": " +
                                  backend_->getBackendName() +
                                  ", by which these ranks reach each other, " + why);
    };
    if (call.reduction >= Reduction::kBitAnd || type_of(call) == at::ScalarType::Undefined)
      refuse(std::string(name_of(call.reduction)) + " of " + name_of(call.dtype),
             "does not have it; reduce a copy on the CPU, or in another type");
    const bool rounds = call.dtype >= DType::kFloat16 && call.reduction <= Reduction::kProduct;
    if (options_.is_rank_ordered && rounds)
      refuse("deterministic=\"rank_order\"",
             "adds in an order of its own; reduce a copy on the CPU, or leave the option out");
  }

  void set_timeout(std::chrono::milliseconds timeout) override {
    if (timeout_.exchange(timeout) != timeout && backend_ != nullptr)
      error_of([&] { backend_->setTimeout(timeout + kBackendGrace); });  // some have none
  }

  Traffic enqueue(const Collective& call, const cuda::StreamContext& stream) override {
    const at::AutoDispatchBelowADInplaceOrView unseen;  // by autograd
    watch(call, stream.capture != 0);
    const std::uint64_t sent_bytes = world_size_ > 1 ? collective(call) : run_alone(call);
    staging_.clear();
    return {.sent_bytes = sent_bytes, .algorithm = call.algorithm};
  }

  void exchange(std::vector<cuda::P2pMessage> messages,
                const cuda::StreamContext& stream) override {
    const at::AutoDispatchBelowADInplaceOrView unseen;
    watch(std::nullopt, stream.capture != 0);
    pass(messages);
  }

  bool map(const void*, std::size_t) override {
    C10_THROW_ERROR(
        NotImplementedError,
        "ringcomm: ranks that reach each other by " + description_ +
            " share no memory; use torch.empty instead: calls on it are sent as messages");
  }

  std::vector<Outcome> take_outcomes() override { return std::exchange(outcomes_, {}); }

  // A rank reports that it fails before it aborts: its streams may still send incomplete data.
  bool may_be_aborted() const noexcept override {
    GroupState* const members = communicator_.group_state();
    return is_aborted_ || (members != nullptr && members->is_aborted(/*asks=*/false));
  }

  void abort() noexcept override {
    if (backend_ == nullptr || is_aborted_.exchange(true)) return;
    error_of([&] { backend_->abort(); });  // after an error calls end with their connections
  }

 private:
  c10d::Backend& backend() const {
    if (is_aborted_)
      throw Error({.kind = ErrorKind::kAborted, .rank = rank_},
                  "ringcomm: the messages of this group's device tensors have been aborted");
    return *backend_;
  }

  at::Tensor array(const void* data, std::size_t num_elems, at::ScalarType type = at::kByte) const {
    return at::for_blob(const_cast<void*>(data), {static_cast<std::int64_t>(num_elems)})
        .options(at::TensorOptions(type).device(device_))
        .target_device(device_)
        .make_tensor();
  }
  // Of the current stream, until the call ends; kept after an exception: the backend may use it.
  at::Tensor new_array(std::size_t num_elems, at::ScalarType type) {
    return staging_.emplace_back(
        at::empty({static_cast<std::int64_t>(num_elems)}, at::TensorOptions(type).device(device_)));
  }
  void copy(void* to, const void* from, std::size_t num_bytes) const {
    if (num_bytes > 0 && to != from)
      array(to, num_bytes).copy_(array(from, num_bytes), /*non_blocking=*/true);
  }

  // Messages of which none waits for another. Both ends know of those without bytes.
  void pass(const std::vector<cuda::P2pMessage>& messages) {
    c10d::Backend& used = backend();
    if (std::ranges::all_of(messages, [](const auto& each) { return each.num_bytes == 0; })) return;
    std::vector<WorkPtr> works;
    const bool is_coalesced = used.supportsCoalescing();
    if (is_coalesced) used.startCoalescing();
    try {
      for (const cuda::P2pMessage& message : messages) {
        if (message.num_bytes == 0) continue;
        std::vector<at::Tensor> tensors{array(message.data, message.num_bytes)};
        works.push_back(message.is_send ? used.send(tensors, message.peer, message.tag)
                                        : used.recv(tensors, message.peer, message.tag));
      }
    } catch (...) {
      if (is_coalesced) error_of([&] { used.endCoalescing(); });  // of the same cause
      throw;
    }
    if (is_coalesced) works = {used.endCoalescing()};  // of which the others are parts
    for (const WorkPtr& work : works) wait(work);
  }

  void wait(const WorkPtr& work) {
    if (work == nullptr) return;
    work->wait();
    outcomes_.push_back([work] { return work->exception(); });
  }

  // ---- collectives; they return the bytes that this rank sends, as by a ring

  std::uint64_t collective(const Collective& call) {
    if (has_shards(call.op)) return exchange_shards(call);
    if (call.op == OpKind::kReduceUpdateGather) return reduce_update_gather(call);
    if (call.op != OpKind::kBarrier && call.num_elems == 0) return 0;
    const std::size_t num_bytes = call.num_bytes();
    const auto num_others = static_cast<std::size_t>(world_size_ - 1);
    const bool is_root = rank_ == call.root;
    std::vector<at::Tensor> tensors;
    switch (call.op) {
      case OpKind::kAllReduce:
        if (call.algorithm == Algorithm::kRing) return ring(call);
        copy(call.outputs[0], call.inputs[0], num_bytes);
        tensors = {array(call.outputs[0], call.num_elems, type_of(call))};
        wait(backend().allreduce(tensors, {.reduceOp = reduction_of(call)}));
        return 2 * num_others * num_bytes / (num_others + 1);
      case OpKind::kReduce:
        if (is_root) copy(call.outputs[0], call.inputs[0], num_bytes);
        tensors = {
            array(is_root ? call.outputs[0] : call.inputs[0], call.num_elems, type_of(call))};
        wait(backend().reduce(tensors, {.reduceOp = reduction_of(call), .rootRank = call.root}));
        return is_root ? 0 : num_bytes;
      case OpKind::kBroadcast:
        tensors = {array(is_root ? call.inputs[0] : call.outputs[0], num_bytes)};
        wait(backend().broadcast(tensors, {.rootRank = call.root}));
        return is_root ? num_others * num_bytes : 0;
      default:  // a barrier
        tensors = {new_array(1, at::kByte)};
        wait(backend().allreduce(tensors));
        return 0;
    }
  }

  // In a group of one every output is its input, or that updated.
  std::uint64_t run_alone(const Collective& call) const {
    if (call.op == OpKind::kReduceUpdateGather)
      update(call, call.inputs[0], call.outputs[0], call.num_elems);
    else if (call.op != OpKind::kBarrier)
      copy(call.outputs[0], call.inputs[0], call.input_shard(0) * element_bytes(call.dtype));
    return 0;
  }

  // Gather and scatter are an all_to_all with empty shards.
  std::uint64_t exchange_shards(const Collective& call) {
    const bool reduces = call.op == OpKind::kReduceScatter;
    const auto tensor_of = [&](const std::optional<CallPart>& part) {
      if (!part) return array(nullptr, 0);
      return reduces ? array(part->data, part->num_elems, type_of(call))
                     : array(part->data, part->num_elems * element_bytes(call.dtype));
    };
    std::vector<at::Tensor> given, taken;
    std::size_t sent_bytes = 0, moved_bytes = 0;
    for (int peer = 0; peer < world_size_; ++peer) {
      at::Tensor& to = given.emplace_back(tensor_of(part_given(call, rank_, peer)));
      const at::Tensor& from = taken.emplace_back(tensor_of(part_taken(call, rank_, peer)));
      moved_bytes += to.nbytes() + from.nbytes();
      if (peer == rank_) continue;
      sent_bytes += to.nbytes();
      // Of an all_to_all in place.
      if (to.nbytes() > 0 && to.const_data_ptr() == from.const_data_ptr())
        to = staging_.emplace_back(to.clone());
    }
    if (moved_bytes == 0 && !has_private_sizes(call.op)) return 0;  // on all ranks
    at::Tensor &own_given = given[static_cast<std::size_t>(rank_)],
               &own_taken = taken[static_cast<std::size_t>(rank_)];
    if (reduces) {
      const c10d::ReduceScatterOptions options{.reduceOp = reduction_of(call)};
      std::vector<at::Tensor> outputs{own_taken};
      std::vector<std::vector<at::Tensor>> inputs{given};
      at::Tensor whole = joined(given);
      wait(whole.defined() ? backend()._reduce_scatter_base(own_taken, whole, options)
                           : backend().reduce_scatter(outputs, inputs, options));
    } else if (call.op == OpKind::kAllGather) {
      std::vector<at::Tensor> inputs{own_given};
      std::vector<std::vector<at::Tensor>> outputs{taken};
      at::Tensor whole = joined(taken);
      wait(whole.defined() ? backend()._allgather_base(whole, own_given)
                           : backend().allgather(outputs, inputs));
    } else {
      copy(own_taken.mutable_data_ptr(), own_given.const_data_ptr(), own_given.nbytes());
      own_given = own_taken = array(nullptr, 0);
      wait(backend().alltoall(taken, given));
    }
    return sent_bytes;
  }

  // One tensor over shards of one size that follow each other; else an undefined one.
  at::Tensor joined(const std::vector<at::Tensor>& shards) const {
    const auto* const begin = static_cast<const std::byte*>(shards[0].const_data_ptr());
    const std::size_t num_bytes = shards[0].nbytes();
    for (std::size_t idx = 0; idx < shards.size(); ++idx)
      if (shards[idx].nbytes() != num_bytes ||
          shards[idx].const_data_ptr() != begin + idx * num_bytes)
        return {};
    return array(begin, shards.size() * shards[0].numel(), shards[0].scalar_type());
  }

  std::uint64_t reduce_update_gather(const Collective& call) {
    const ElemRange own = ChunkLayout(call.num_elems, world_size_).chunk(rank_);
    const at::Tensor grad = new_array(own.num_elems * element_bytes(call.dtype), at::kByte);
    void* const param = at(call.outputs[0], own.begin_elems, call.output_element_bytes());
    return update_in_parts(
               call, rank_, world_size_, grad.mutable_data_ptr(),
               [&] { update(call, grad.const_data_ptr(), param, own.num_elems); },
               [&](const Collective& part) { return Traffic{.sent_bytes = collective(part)}; })
        .sent_bytes;
  }

  // The optimizer's step on a reduced gradient, by ringcomm's kernel.
  void update(const Collective& call, const void* grad, void* param, std::size_t num_elems) const {
    if (num_elems == 0) return;
    const cuda::Kernels& kernels = update_kernels(device_);
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
    const cuda::ContextGuard guard(device_.index());
    cuda::KernelCall kernel_call;
    const cuda::LaunchPlan plan = cuda::plan_own_update(call, grad, param, num_elems, kernel_call);
    kernels.launch(plan.kernel, plan.num_blocks, kernel_call, handle_of(stream));
  }

  // An all_reduce: in each step a rank sends a slice of a chunk to the next rank, and receives one
  // that it adds to its own by torch's operators, or keeps. The chunks are those of
  // transport/shm/ring.cc, where the all-gather continues the sequence of the reduce-scatter.
  std::uint64_t ring(const Collective& call) {
    const RingSchedule ranks(rank_, world_size_);
    const ChunkLayout layout(call.num_elems, world_size_);
    const std::size_t slice_elems = kRingSliceBytes / element_bytes(call.dtype);
    const at::Tensor all = array(call.outputs[0], call.num_elems, type_of(call));
    const at::Tensor place =
        new_array(std::min(slice_elems, layout.chunk(0).num_elems), all.scalar_type());
    const auto message = [](const at::Tensor& data, int peer, bool is_send) {
      return cuda::P2pMessage{static_cast<std::byte*>(data.data_ptr()), data.nbytes(), 0,
                              static_cast<std::int16_t>(peer), is_send};
    };
    std::uint64_t sent_bytes = 0;
    copy(call.outputs[0], call.inputs[0], call.num_bytes());
    for (std::size_t idx = 0; idx < num_slices(layout.chunk(0).num_elems, slice_elems); ++idx)
      for (int step = 0; step < 2 * ranks.num_steps(); ++step) {
        const auto slice = [&](int chunk) {
          const auto [begin, num] = slice_of(layout.chunk(chunk), idx, slice_elems);
          return all.narrow(0, static_cast<std::int64_t>(begin), static_cast<std::int64_t>(num));
        };
        const bool sums = step < ranks.num_steps();
        at::Tensor sent = slice(ranks.reduce_scatter_send_chunk(step));
        at::Tensor own = slice(ranks.reduce_scatter_recv_chunk(step));
        at::Tensor received = sums ? place.narrow(0, 0, own.numel()) : own;
        pass({message(sent, ranks.next(), /*is_send=*/true),
              message(received, ranks.previous(), /*is_send=*/false)});
        sent_bytes += sent.nbytes();
        if (!sums) continue;
        call.reduction == Reduction::kProduct ? own.mul_(received)
        : call.reduction == Reduction::kMin   ? at::minimum_out(own, own, received)
        : call.reduction == Reduction::kMax   ? at::maximum_out(own, own, received)
                                              : own.add_(received);
        if (step + 1 == ranks.num_steps() && call.reduction == Reduction::kAvg)
          own.is_floating_point() ? own.div_(world_size_) : own.div_(world_size_, "trunc");
      }
    return sent_bytes;
  }

  // Call it when messages start, of a collective or, without `header`, of a user.
  void watch(const std::optional<CallHeader>& header, bool is_captured) {
    if (!watch_) return;
    const std::lock_guard lock(mutex_);
    last_ = header;
    if (is_captured) watch_->stay_awake();  // they may start at any time
    watch_->look_for(timeout_.load() / kCheckInterval + 1);
  }

  // The watchdog: ends the group when a rank dies or fails while messages are in flight, because
  // the backend may wait for it without end. A rank that has left has ended its calls before.
  bool look_at_peers() {
    GroupState& members = *communicator_.group_state();
    std::ignore = members.is_aborted(/*asks=*/++num_looks_ % kLooksPerQuestion == 0);
    for (int peer = 0; peer < world_size_; ++peer) {
      const WaitStatus state = members.state_of(peer);
      if (peer == rank_ || (state != WaitStatus::kPeerDied && state != WaitStatus::kAborted))
        continue;
      // The error is kept for the next call or wait.
      error_of([&] { communicator_.failure().raise_stopped(state, peer, activity()); });
      abort();
      return false;
    }
    return true;
  }

  Activity activity() {
    const std::lock_guard lock(mutex_);
    if (!last_) return {.op = "send", .description = "sends and receives", .timeout = timeout_};
    return {.op = name_of(last_->op),
            .seq = static_cast<std::int64_t>(last_->seq),
            .description = describe(*last_),
            .timeout = timeout_};
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  Communicator& communicator_;
  CommunicatorOptions options_;
  int rank_;
  int world_size_;
  c10::Device device_;
  std::string description_ = "none: a group of one";
  std::vector<at::Tensor> staging_;
  std::vector<Outcome> outcomes_;  // of the works that were waited for
  std::atomic<bool> is_aborted_ = false;
  int num_looks_ = 0;  // the watchdog's
  std::atomic<std::chrono::milliseconds> timeout_;
  std::mutex mutex_;
  std::optional<CallHeader> last_;    // guarded by mutex_
  std::optional<WatchThread> watch_;  // not of a group of one; last: it uses all of the above
};

}  // namespace

std::unique_ptr<cuda::DeviceTransport> make_message_device_transport(
    const c10::intrusive_ptr<c10d::Store>& store, Communicator& communicator,
    const GroupOptions& options, c10::Device device, std::size_t sum_bytes) {
  auto made = std::make_unique<MessageDeviceTransport>(
      communicator.world_size() > 1 ? make_device_backend(device, store, communicator, options)
                                    : nullptr,
      communicator, options, device);
  try {
    made->connect(sum_bytes);
  } catch (...) {
    made->abort();
    throw;
  }
  return made;
}

}  // namespace ringcomm
