#include "bindings/process_group.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "bindings/c10d_messages.h"
#include "bindings/coalesced_work.h"
#include "bindings/monitored_barrier.h"
#include "bindings/python_errors.h"
#include "bindings/store_adapter.h"
#include "core/errors.h"
#include "transport/per_process.h"
#include "transport/wait_limits.h"

namespace ringcomm {
namespace {

constexpr const char* kDestroyed =
    "ringcomm: this process group has been destroyed; make a new one with init_process_group or "
    "new_group";
constexpr const char* kNoDevices =
    "ringcomm: this build knows no tensors but those of the CPU; build it with the GPUs' part: "
    "RINGCOMM_CUDA=1 pip install --no-build-isolation --force-reinstall --no-deps .";
constexpr std::size_t kMaxFinishedWorks = 1024;  // of one coalesced block
// How long calls of other threads have to leave a group that is destroyed.
constexpr std::chrono::seconds kLeavePatience{10};

// The groups that have all ranks, by the store that they were made over, as long as they live: they
// know the processes of every later group over that store.
struct Worlds {
  std::mutex mutex;
  std::map<const c10d::Store*, std::weak_ptr<Communicator>> by_store;
};
constinit PerProcess<Worlds> worlds;

const c10d::Store* base_of(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  return prefixed != nullptr ? prefixed->getUnderlyingNonPrefixStore().get() : store.get();
}

KnownProcesses ask_world(const c10::intrusive_ptr<c10d::Store>& store,
                         const std::vector<uint64_t>& global_ranks) {
  Worlds& all = worlds.get();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_store.find(base_of(store));
  if (found == all.by_store.end()) return {};
  const auto asking = [&](bool (Communicator::*question)(int)) {
    return [question, world = found->second, global_ranks](int rank) {
      const auto idx = static_cast<std::size_t>(rank);
      const std::shared_ptr<Communicator> known = world.lock();
      return known != nullptr && idx < global_ranks.size() &&
             global_ranks[idx] < static_cast<std::uint64_t>(known->world_size()) &&
             (known.get()->*question)(static_cast<int>(global_ranks[idx]));
    };
  };
  return {.has_died = asking(&Communicator::has_died),
          .is_stopped = asking(&Communicator::is_stopped)};
}

void enter_world(const c10::intrusive_ptr<c10d::Store>& store,
                 const std::vector<uint64_t>& global_ranks,
                 const std::shared_ptr<Communicator>& communicator) {
  for (std::size_t rank = 0; rank < global_ranks.size(); ++rank)
    if (global_ranks[rank] != rank) return;
  Worlds& all = worlds.get();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.by_store, [](const auto& item) { return item.second.expired(); });
  const auto [known, is_new] = all.by_store.try_emplace(base_of(store), communicator);
  // A group of the first ranks only knows fewer than one of all.
  if (const auto other = known->second.lock();
      !is_new && other != nullptr && other->world_size() < communicator->world_size())
    known->second = communicator;
}

}  // namespace

constinit MakeDevices make_devices = nullptr;

ProcessGroupRingcomm::ProcessGroupRingcomm(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                           int size, c10::intrusive_ptr<GroupOptions> options)
    : Backend(rank, size),
      options_(std::move(options)),
      last_split_(c10::intrusive_ptr<c10d::Backend>()) {
  StoreAdapter adapter(store);
  with_python_errors([&] {
    communicator_ = std::make_shared<Communicator>(
        adapter, rank, size, options_->engine, std::min(options_->timeout, kLongestTimeout),
        options_->engine.p2p_backend.empty()
            ? MakeMessages{}
            : [&](const LookForRanks& look) -> std::unique_ptr<MessageTransport> {
          return std::make_unique<C10dMessages>(make_message_backend(options_->engine.p2p_backend,
                                                                     store, rank, size, *options_,
                                                                     look, "the group's messages"));
        },
        ask_world(store, options_->global_ranks_in_group));
  });
  if (trace::is_on())
    communicator_->trace_as(options_->group_name, options_->global_ranks_in_group);
  enter_world(store, options_->global_ranks_in_group, communicator_);
  if (make_devices != nullptr) devices_ = make_devices(store, options_, communicator_, rank, size);
}

ProcessGroupRingcomm::~ProcessGroupRingcomm() {
  try {
    shutdown();
  } catch (const python_error&) {
    // A destructor cannot raise what a signal handler did: Python raises it at its next
    // instruction.
    PyErr_SetInterrupt();
  }
}

std::shared_ptr<Communicator> ProcessGroupRingcomm::communicator() const {
  std::shared_ptr<Communicator> communicator;
  {
    const std::lock_guard lock(mutex_);
    communicator = communicator_;
  }
  TORCH_CHECK_VALUE(communicator != nullptr, kDestroyed);
  return communicator;
}

std::shared_ptr<Devices> ProcessGroupRingcomm::devices() const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(communicator_ != nullptr, kDestroyed);
  TORCH_CHECK_VALUE(devices_ != nullptr, kNoDevices);
  return devices_;
}

std::map<std::string, std::string> ProcessGroupRingcomm::device_transports() {
  if (make_devices == nullptr) return {};
  return devices()->transports();
}

void ProcessGroupRingcomm::abort() {
  const std::lock_guard lock(mutex_);
  if (communicator_ != nullptr) communicator_->abort("the process group was aborted");
  if (devices_ != nullptr) devices_->abort();
}

void ProcessGroupRingcomm::shutdown() {
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Devices> devices;
  {
    const std::lock_guard lock(mutex_);
    communicator.swap(communicator_);
    devices.swap(devices_);
  }
  if (communicator == nullptr) return;
  if (communicator->is_inherited()) {
    // In a forked child the group is the parent's; what must not be destroyed is leaked.
    new std::shared_ptr(std::move(communicator));
    new std::shared_ptr(std::move(devices));
    return;
  }
  const auto end = [&] {
    if (devices != nullptr) devices->drain();
    communicator->close(is_interrupted);
    // Calls of other threads, which have nothing to wait for any more, use the communicator too.
    const auto deadline = std::chrono::steady_clock::now() + kLeavePatience;
    while (devices.use_count() > 1 && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    devices.reset();
    communicator.reset();
  };
  with_python_errors([&] { without_gil(end); });
}

void ProcessGroupRingcomm::eagerConnectSingleDevice(at::Device device) {
  if (device.is_cpu()) return;
  const c10::DeviceGuard guard(device);
  try {
    with_python_errors([&] { devices()->connect(device); });
  } catch (const c10::ValueError&) {
    // No carrier supports such tensors; a call with one raises.
  }
}

std::chrono::milliseconds ProcessGroupRingcomm::effective(std::chrono::milliseconds timeout) const {
  return std::min(timeout <= kNoTimeout ? options_->timeout : timeout, kLongestTimeout);
}

c10d::ErrorType ProcessGroupRingcomm::getError() {
  const std::shared_ptr<Communicator> engine = communicator();
  const std::exception_ptr cause = engine->failure().first_cause();
  if (cause == nullptr) return c10d::ErrorType::SUCCESS;
  try {
    std::rethrow_exception(cause);
  } catch (const Error& error) {
    switch (error.info().kind) {
      case ErrorKind::kTimeout:
        return c10d::ErrorType::TIMEOUT;
      case ErrorKind::kPeerDied:
        return c10d::ErrorType::REMOTE_ERROR;
      default:
        break;
    }
  } catch (...) {
  }
  return c10d::ErrorType::COMM_ERROR;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupRingcomm::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& opts) {
  const auto own = std::find(ranks.begin(), ranks.end(), getRank());
  if (own == ranks.end()) return nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (last_split_name_ == opts->group_name)
      if (const auto last = last_split_.lock(); last != nullptr) return last;
  }
  // A copy: c10d hands the same options to every split.
  const auto* given = dynamic_cast<const GroupOptions*>(opts.get());
  auto options = c10::make_intrusive<GroupOptions>(given != nullptr ? *given : *options_);
  options->timeout = opts->timeout;
  options->group_name = opts->group_name;
  options->global_ranks_in_group.clear();
  for (const int rank : ranks)
    if (const auto idx = static_cast<std::size_t>(rank);
        idx < options_->global_ranks_in_group.size())
      options->global_ranks_in_group.push_back(options_->global_ranks_in_group[idx]);
  auto group = c10::make_intrusive<ProcessGroupRingcomm>(
      store, static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size()), options);
  const std::lock_guard lock(mutex_);
  last_split_name_ = opts->group_name;
  last_split_ = c10::weak_intrusive_ptr<c10d::Backend>(group);
  return group;
}

bool ProcessGroupRingcomm::supportsCoalescing() const { return at::getAccelerator().has_value(); }

void ProcessGroupRingcomm::startCoalescing() {
  const std::lock_guard lock(mutex_);
  is_coalescing_ = true;
  coalesced_works_.clear();  // of a block that an exception left
  coalesced_messages_.clear();
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::endCoalescing() {
  std::vector<Work> works;
  std::vector<DeviceMessageCall> messages;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK_VALUE(is_coalescing_, "ringcomm: endCoalescing() without startCoalescing()");
    is_coalescing_ = false;
    works.swap(coalesced_works_);
    messages.swap(coalesced_messages_);
  }
  if (!messages.empty()) {
    const c10::Device device = messages.front().device;
    works.push_back(devices()->exchange(
        device, std::move(messages),
        {.op_type = c10d::OpType::COALESCED, .title = "ringcomm:coalesced", .results = {}}));
  }
  return c10::make_intrusive<CoalescedWork>(getRank(), std::move(works));
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::coalesced(Work work) {
  const std::lock_guard lock(mutex_);
  if (!is_coalescing_ || work == nullptr) return work;
  // A block that an exception has left open must not keep all later works.
  if (coalesced_works_.size() >= kMaxFinishedWorks)
    std::erase_if(coalesced_works_,
                  [](const Work& other) { return other->isCompleted() && other->isSuccess(); });
  coalesced_works_.push_back(work);
  return work;
}

CommsEvent ProcessGroupRingcomm::event_of(const char* title) const {
  return {.seq = static_cast<std::int64_t>(communicator()->next_seq()),
          .group = {getGroupUid(), getGroupDesc()},
          .rank = getRank(),
          .world_size = getSize(),
          .global_ranks = &options_->global_ranks_in_group,
          // Without "ringcomm:".
          .name = std::string(std::strchr(title, ':') + 1)};
}

trace::Event ProcessGroupRingcomm::trace_event_of(const char* title,
                                                  const std::vector<TensorCall>& calls) const {
  const std::shared_ptr<Communicator> engine = communicator();
  trace::Event event{.seq = engine->next_seq(),
                     .group = engine->trace_group(),
                     .kind = trace::Kind::kCall,
                     .name = trace::name_number(title)};
  for (const TensorCall& item : calls) event.num_bytes += item.call.num_bytes();
  if (!calls.empty()) event.dtype = trace::name_number(name_of(calls.front().call.dtype));
  return event;
}

Algorithm ProcessGroupRingcomm::algorithm_of(const Collective& call, c10::Device device) const {
  if (device.is_cpu()) return communicator()->algorithm_of(call);
  return devices()->algorithm_of(call, device);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::start(c10d::OpType op_type, const char* title,
                                                       std::vector<TensorCall> calls,
                                                       std::vector<at::Tensor> results,
                                                       std::chrono::milliseconds timeout,
                                                       bool is_async,
                                                       std::optional<c10::Device> given) {
  const trace::Span traced([&] { return trace_event_of(title, calls); });
  const c10::Device device = given ? *given : device_of(calls, results, title);
  const auto run = [&] {
    return coalesced(start_collective(op_type, title, std::move(calls), std::move(results), timeout,
                                      is_async, device));
  };
  if (!is_profiled()) return run();
  CommsEvent event = event_of(title);
  event.is_async = is_async;
  event.describe(calls, results);
  if (!calls.empty() && calls.front().call.op == OpKind::kAllReduce)
    event.name += std::string("/") + name_of(algorithm_of(calls.front().call, device));
  return event.around(run);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::start_collective(
    c10d::OpType op_type, const char* title, std::vector<TensorCall> calls,
    std::vector<at::Tensor> results, std::chrono::milliseconds timeout, bool is_async,
    c10::Device device) {
  if (!device.is_cpu()) {
    DeviceCallInfo info{
        .op_type = op_type, .title = title, .results = std::move(results), .is_async = is_async};
    if (op_type == c10d::OpType::BARRIER) info.barrier_timeout = effective(timeout);
    return devices()->start(device, std::move(calls), std::move(info));
  }
  const std::shared_ptr<Communicator> engine = communicator();
  auto work = c10::make_intrusive<CollectiveWork>(engine, op_type, title, std::move(calls),
                                                  std::move(results));
  if (is_async)
    CollectiveWork::submit(work, *engine, effective(timeout));
  else
    work->run(*engine, effective(timeout));
  return work;
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::barrier(const c10d::BarrierOptions& opts) {
  std::vector<TensorCall> calls(1);
  c10::Device device = opts.device.value_or(c10::Device(c10::kCPU));
  if (!device.is_cpu() && !device.has_index())
    device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  return start(c10d::OpType::BARRIER, "ringcomm:barrier", std::move(calls), {}, opts.timeout,
               opts.asyncOp, device);
}

void ProcessGroupRingcomm::monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) {
  const trace::Span traced([&] { return trace_event_of("ringcomm:monitored_barrier", {}); });
  const bool has_own = opts.timeout != c10d::kUnsetTimeout;
  const std::chrono::milliseconds patience = effective(c10d::kUnsetTimeout);
  with_python_errors([&] {
    monitored_barrier(
        communicator(), num_monitored_barriers_,
        has_own ? std::min(opts.timeout, kLongestTimeout) : patience,
        has_own ? std::max(patience, std::min(2 * opts.timeout, kLongestTimeout)) : patience,
        waitAllRanks);
  });
}

}  // namespace ringcomm
