#include "cuda/bindings/device_group.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Logging.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>

#include "bindings/python_errors.h"
#include "communicator/records.h"
#include "core/errors.h"
#include "cuda/collectives/ipc_transport.h"
#include "cuda/messages/transport.h"
#include "host/group_state.h"

namespace ringcomm {
namespace {

using TransportPtr = std::unique_ptr<cuda::DeviceTransport>;

// Of a device, to end aborted work, before its memory is leaked.
constexpr std::chrono::seconds kAbortPatience{10};
// How long the watchdogs of this rank and others may take to report why a call failed.
constexpr std::chrono::seconds kFailurePatience{2};

// Adds the tensors that a call uses to `kept`, and moves what its caller gave to `inputs`.
void take_tensors(TensorCall& item, std::vector<at::Tensor>& kept,
                  std::vector<at::Tensor>& inputs) {
  kept.insert(kept.end(), item.kept.begin(), item.kept.end());
  std::ranges::move(item.profiled, std::back_inserter(inputs));
  item.profiled.clear();
}

// Null on all ranks, with the reason, if the ranks cannot map each other's memory.
TransportPtr make_ipc_transport(const c10::intrusive_ptr<c10d::Store>& store,
                                Communicator& communicator, const GroupOptions& options,
                                c10::Device device, std::string& reason) {
  if (communicator.world_size() == 1)
    reason = "a group of one";
  else if (!is_of_driver(device))
    reason = "not a CUDA device";
  else if (options.engine.transport == "messages")
    reason = "the transport is messages";
  if (!reason.empty()) return nullptr;
  const std::string name = "ringcomm: group " + options.group_name;
  const WaitLimits limits{.timeout = std::min(options.timeout, kLongestTimeout),
                          .is_interrupted = is_interrupted};
  const auto make_sums = [&]() -> TransportPtr {
    if (options.engine.algorithm != Algorithm::kAuto || options.engine.is_rank_ordered)
      return nullptr;
    TransportPtr made;
    try {
      made = make_message_device_transport(store, communicator, options, device,
                                           cuda::kLeastSwitchBytes);
    } catch (const std::exception& error) {
      communicator.failure().rethrow_if_any();
      LOG(WARNING) << name << ": sums stay with ringcomm's kernels: " << error.what();
    }
    const auto all = RecordExchange(communicator, limits).all_gather(std::uint8_t{made != nullptr});
    if (std::ranges::find(all, 0) == all.end()) return made;
    if (made != nullptr) made->abort();
    return nullptr;
  };
  try {
    const cuda::ContextGuard guard(device.index());
    const cuda::RelaxedCapture relaxed;
    return std::make_unique<cuda::IpcTransport>(
        communicator, device.index(), limits,
        [name](const std::string& error) { LOG(ERROR) << name << " failed: " << error; },
        make_sums);
  } catch (const Unavailable& unavailable) {
    reason = unavailable.what();
    return nullptr;
  }
}

}  // namespace

DeviceGroup::DeviceGroup(c10::intrusive_ptr<c10d::Store> store,
                         c10::intrusive_ptr<GroupOptions> options,
                         std::weak_ptr<Communicator> communicator, int rank, int world_size)
    : store_(std::move(store)),
      options_(std::move(options)),
      communicator_(std::move(communicator)),
      rank_(rank),
      world_size_(world_size) {}

DeviceGroup::~DeviceGroup() {
  for (const auto& use : uses_) use->give_up();
}

cuda::DeviceTransport& DeviceGroup::transport(c10::Device device) {
  const auto find = [&]() -> cuda::DeviceTransport* {
    const std::lock_guard lock(mutex_);
    for (const auto& [known, transport] : transports_)
      if (known == device) return transport.get();
    return nullptr;
  };
  if (cuda::DeviceTransport* const found = find()) return *found;
  // It waits for other ranks, so mutex_ is free meanwhile.
  const std::lock_guard making(making_);
  if (cuda::DeviceTransport* const found = find()) return *found;  // another thread's
  TransportPtr made;
  try {
    // Not the caller's, which may be captured.
    const c10::StreamGuard beside(own_stream(device, /*peer=*/-1));
    made = make_transport(*communicator(), device);
  } catch (const std::exception&) {
    check();  // throws the reason if a watchdog ended the group
    throw;
  }
  const std::lock_guard lock(mutex_);
  if (is_aborted_) made->abort();
  return *transports_.emplace_back(device, std::move(made)).second;
}

cuda::DeviceTransport& DeviceGroup::transport_of_call(c10::Device device) {
  cuda::DeviceTransport& found = transport(device);
  // A kernel may have given up since the watchdog's last look, which tells why.
  if (!has_awaited_reason_ && found.may_have_given_up()) {
    has_awaited_reason_ = true;  // once, if none comes
    await_reason([] { return true; });
  }
  found.set_timeout(std::min(options_->timeout, kLongestTimeout));  // of set_timeout()
  return found;
}

TransportPtr DeviceGroup::make_transport(Communicator& communicator, c10::Device device) const {
  const c10::DeviceGuard guard(device);
  // The faster one first; the other takes every group.
  std::string reason;
  TransportPtr transport = make_ipc_transport(store_, communicator, *options_, device, reason);
  const bool is_slower =
      transport != nullptr
          ? transport->description().find(cuda::kFewQueues) != std::string::npos
          : is_of_driver(device) && communicator.transport_description().starts_with("shm:");
  std::string not_by;
  if (transport == nullptr) {
    not_by = "not by cuda_ipc: " + reason;
    try {
      transport =
          make_message_device_transport(store_, communicator, *options_, device, /*sum_bytes=*/0);
    } catch (c10::Error& error) {
      error.add_context(not_by);
      throw;
    } catch (const Error& error) {
      throw Error(error.info(), std::string(error.what()) + "; " + not_by);
    }
    not_by = "; " + not_by;
  }
  const pybind11::gil_scoped_acquire acquired;
  static bool has_warned = false;  // with the GIL
  const bool warns = is_slower && !std::exchange(has_warned, true);
  pybind11::module_::import("logging")
      .attr("getLogger")("ringcomm")
      .attr(warns ? "warning" : "info")("group %s, rank %d of %d: tensors on %s go by %s",
                                        options_->group_name, communicator.rank(),
                                        communicator.world_size(), device.str(),
                                        transport->description() + not_by);
  return transport;
}

bool DeviceGroup::map(c10::Device device, const void* data, std::size_t num_bytes) {
  const std::lock_guard order(order_);
  check();
  return transport_of_call(device).map(data, num_bytes);
}

Algorithm DeviceGroup::algorithm_of(Collective call, c10::Device device) {
  transport(device).plan(call, /*is_captured=*/false);
  return call.algorithm;
}

void DeviceGroup::abort() noexcept {
  const std::lock_guard lock(mutex_);
  if (std::exchange(is_aborted_, true)) return;
  for (const auto& use : uses_) use->give_up();
  for (const auto& [device, transport] : transports_) transport->abort();
}

std::shared_ptr<Communicator> DeviceGroup::communicator() const {
  std::shared_ptr<Communicator> communicator = communicator_.lock();
  TORCH_CHECK_VALUE(communicator != nullptr, "ringcomm: this process group has been destroyed");
  return communicator;
}

void DeviceGroup::abort_if_failed() {
  const auto communicator = communicator_.lock();
  if (communicator != nullptr && communicator->failure().has_failed()) abort();
}

void DeviceGroup::check() {
  abort_if_failed();
  if (const auto communicator = communicator_.lock(); communicator != nullptr)
    communicator->failure().rethrow_if_any();
}

void DeviceGroup::await_reason(c10::function_ref<bool()> may_come) {
  const auto deadline = deadline_after(kFailurePatience);
  for (check(); may_come() && RunningClock::now() < deadline; check())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  check();  // reported since
}

void DeviceGroup::throw_given_up(const char* title, const std::string& detail) {
  await_reason([&] {
    const auto communicator = communicator_.lock();
    if (communicator == nullptr) return false;
    GroupState* const members = communicator->group_state();
    if (members != nullptr && members->state_of(rank_) == WaitStatus::kAborted)
      communicator->failure().raise_stopped(WaitStatus::kAborted, rank_,
                                            {.op = title, .description = title});
    return true;
  });
  const std::string why = std::string(title) + " failed on its device" +
                          (detail.empty() ? "; no rank has reported a reason" : ": " + detail);
  end(why);
  check();
  throw Error({.kind = ErrorKind::kAborted, .rank = rank_, .op = title}, "ringcomm: " + why);
}

bool DeviceGroup::has_another_given_up() {
  const auto communicator = communicator_.lock();
  return communicator != nullptr && communicator->group_state() != nullptr &&
         communicator->group_state()->is_aborted(/*asks=*/true);
}

void DeviceGroup::end(const std::string& why) {
  if (const auto communicator = communicator_.lock(); communicator != nullptr)
    communicator->abort(why);
  abort();
}

void DeviceGroup::drain() {
  const std::lock_guard order(order_);
  auto deadline = deadline_after(options_->timeout);
  std::deque<std::shared_ptr<DeviceUse>> uses;
  {
    const std::lock_guard lock(mutex_);
    uses = uses_;
  }
  for (const auto& use : uses) {
    for (bool has_aborted = false; !use->is_over();
         std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
      const auto communicator = communicator_.lock();
      const bool has_failed = communicator == nullptr || communicator->failure().has_failed();
      if (!has_failed && RunningClock::now() < deadline) continue;
      if (has_aborted && RunningClock::now() >= deadline) break;
      if (std::exchange(has_aborted, true)) continue;
      abort();
      deadline = deadline_after(kAbortPatience);
    }
  }
}

c10::Stream DeviceGroup::own_stream(c10::Device device, int peer) {
  const std::pair key(device.index(), peer);
  auto found = streams_.find(key);
  if (found == streams_.end()) {
    const c10::impl::VirtualGuardImpl streams(device.type());
    found = streams_.emplace(key, streams.getStreamFromGlobalPool(device, true)).first;
  }
  return found->second;
}

// Releases completed uses. The device is queried only for those that still hold tensors. Of the
// others that nothing else references, the last one of each stream is sufficient. With order_, so
// that nobody else adds or removes one.
void DeviceGroup::keep(const std::shared_ptr<DeviceUse>& use) {
  // A tensor that is freed may need the GIL, whose holder may wait for mutex_.
  std::vector<std::shared_ptr<DeviceUse>> released;
  for (const auto& earlier : uses_)
    if (earlier->has_tensors() && !earlier->is_over()) break;
  const std::lock_guard lock(mutex_);
  std::vector<c10::Stream> later{use->stream()};
  const auto is_told_of = [&](const auto& earlier) {
    if (earlier->is_known_to_be_over()) return true;
    if (earlier.use_count() > 1 || earlier->has_tensors()) return false;
    if (std::find(later.begin(), later.end(), earlier->stream()) != later.end()) return true;
    later.push_back(earlier->stream());
    return false;
  };
  for (auto one = uses_.rbegin(); one != uses_.rend(); ++one)
    if (is_told_of(*one)) released.push_back(std::exchange(*one, nullptr));
  std::erase(uses_, nullptr);
  uses_.push_back(use);
  if (is_aborted_) use->give_up();
}

void DeviceGroup::ending_on_failure(c10::function_ref<std::string()> what,
                                    c10::function_ref<void()> enqueue) {
  try {
    enqueue();
  } catch (const std::exception& error) {
    // The hosts may still compare headers, which tells more.
    await_reason([&] { return num_checks_ > 0; });
    // The other ranks have continued, so the group ends.
    end(what() + ": " + error.what());
    throw;
  }
}

void DeviceGroup::run(Collective call, cuda::DeviceTransport& transport,
                      const cuda::StreamPlace& place, const std::function<void()>& finish) {
  if (call.dtype == DType::kSoftmaxStats)
    throw std::invalid_argument("softmax statistics are merged in one step on CPUs only");
  const std::shared_ptr<Communicator> engine = communicator();
  engine->issue(call);
  if (world_size_ > 1 &&
      !transport.finds_mismatches()) {  // before a refusal: others may not refuse
    check_header(*engine, call, options_->timeout, [weak = weak_from_this()](bool has_failed) {
      const auto group = weak.lock();
      if (group == nullptr) return;
      if (has_failed) group->abort();
      --group->num_checks_;
    });
    ++num_checks_;
  }
  transport.plan(call, place.capture != 0);
  recorded_.push_back(engine->record_on_device(recorder::event_of(call, 0)));
  ending_on_failure([&] { return describe(call); },
                    [&] {
                      engine->stats().count(call.op, transport.enqueue(call, place));
                      if (finish) finish();
                    });
}

std::shared_ptr<DeviceUse> DeviceGroup::enqueue(c10::Device device, bool is_async, int peer,
                                                Tensors kept, const Body& body) {
  const std::lock_guard order(order_);
  check();
  const c10::Stream home = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const c10::Stream stream = is_async ? own_stream(device, peer) : home;
  const c10::StreamGuard guard(stream);
  const DeviceContext context(device);
  cuda::DeviceTransport& used = transport_of_call(device);  // before the stream may be captured
  if (stream != home) DeviceEvent::record(home).block(stream);
  cuda::StreamPlace place;
  if (has_driver_for(device)) place = cuda::StreamPlace::of(handle_of(stream));
  // Nothing can be launched in it, on this rank alone: the group goes on.
  if (place.capture == cuda::kFailedCapture)
    throw std::runtime_error(
        "ringcomm: the capture of this stream had failed before this call: end it, and begin "
        "again");
  std::shared_ptr<const cuda::Event> end;
  recorded_.clear();
  try {
    if (body(used, place)) end = used.last_end();
    if (const char* const why = used.why_staged()) {
      TORCH_WARN_ONCE("ringcomm: calls copy some tensors of GPUs, because ", why);
    }
  } catch (...) {
    if (communicator()->failure().has_failed()) {
      const std::lock_guard lock(mutex_);
      lost_.insert(lost_.end(), kept.begin(), kept.end());
    }
    throw;
  }
  auto use = std::make_shared<DeviceUse>(
      stream, home, place.capture != 0,
      end != nullptr ? DeviceEvent(end) : DeviceEvent::record(stream), std::move(kept), used,
      used.take_outcomes(), std::exchange(recorded_, {}));
  keep(use);
  return use;
}

WorkPtr DeviceGroup::enqueue_work(c10::Device device, const CallInfo& info, const Tensors& inputs,
                                  Tensors kept, Tensors results, const Body& body) {
  std::optional<std::chrono::milliseconds> barrier_timeout;  // the host waits for a barrier
  if (info.op_type == c10d::OpType::BARRIER) barrier_timeout = info.timeout;
  kept.insert(kept.end(), results.begin(), results.end());
  auto work = c10::make_intrusive<DeviceWork>(weak_from_this(), rank_, info.op_type, info.title,
                                              inputs, std::move(results),
                                              communicator()->next_seq(true), barrier_timeout);
  with_python_errors([&] {
    work->set_enqueued(enqueue(device, info.is_async, info.peer, std::move(kept), body));
  });
  if (barrier_timeout && !info.is_async) work->wait();
  return work;
}

void DeviceGroup::run_at_once(c10::Device device, const Collective& call, Tensors tensors) {
  with_python_errors([&] {
    enqueue(device, /*is_async=*/false, /*peer=*/-1, std::move(tensors),
            [&](cuda::DeviceTransport& transport, const cuda::StreamPlace& place) {
              run(call, transport, place);
              return true;
            });
    check();
  });
}

WorkPtr DeviceGroup::start(c10::Device device, const CallInfo& info, std::vector<TensorCall> calls,
                           Tensors results) {
  Tensors inputs, kept;
  for (TensorCall& item : calls) {
    item.link();
    take_tensors(item, kept, inputs);
  }
  return enqueue_work(device, info, inputs, std::move(kept), std::move(results),
                      [&](cuda::DeviceTransport& transport, const cuda::StreamPlace& place) {
                        for (const TensorCall& item : calls) {  // all are refused, or none
                          Collective planned = item.call;
                          if (calls.size() > 1) transport.plan(planned, place.capture != 0);
                        }
                        for (const TensorCall& item : calls)
                          run(item.call, transport, place, item.finish);
                        return !calls.empty() && !calls.back().finish;
                      });
}

WorkPtr DeviceGroup::exchange(CallInfo info, std::vector<DeviceMessage> calls, Tensors results) {
  Tensors inputs, kept;
  std::vector<cuda::P2pMessage> messages;
  if (calls.size() == 1) info.peer = calls[0].info.peer;
  for (auto& [each, item] : calls) {
    const bool is_send = item.call.op == OpKind::kSend;
    messages.push_back({.data = static_cast<std::byte*>(item.message_data()),
                        .num_bytes = item.call.num_elems,
                        .tag = each.tag,
                        .peer = static_cast<std::int16_t>(each.peer),
                        .is_send = is_send});
    take_tensors(item, kept, inputs);
  }
  bool is_last = true;
  const auto post = [&](cuda::DeviceTransport& transport, const cuda::StreamPlace& place) {
    for (const cuda::P2pMessage& message : messages)
      recorded_.push_back(communicator()->record_on_device(
          {.seq = static_cast<std::uint64_t>(message.tag),
           .num_bytes = message.num_bytes,
           .peer = message.peer,
           .op = message.is_send ? OpKind::kSend : OpKind::kRecv}));
    transport.exchange(messages, place);
    for (const DeviceMessage& call : calls) {
      if (!call.item.finish) continue;
      call.item.finish();
      is_last = false;
    }
  };
  return enqueue_work(*calls[0].info.device, info, inputs, std::move(kept), std::move(results),
                      [&](cuda::DeviceTransport& transport, const cuda::StreamPlace& place) {
                        transport.check_messages(messages);
                        ending_on_failure([] { return "sends and receives"; },
                                          [&] { post(transport, place); });
                        return is_last;
                      });
}

}  // namespace ringcomm
