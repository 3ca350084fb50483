#include "cuda/bindings/device_group.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>

#include "bindings/python_errors.h"
#include "communicator/records.h"
#include "core/errors.h"
#include "cuda/bindings/device_transports.h"
#include "host/group_state.h"

namespace ringcomm {
namespace {

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
  for (const auto& operation : operations_) operation->mark_aborted();
}

cuda::DeviceTransport& DeviceGroup::transport(c10::Device device) {
  const auto find = [&]() -> cuda::DeviceTransport* {
    const std::lock_guard lock(mutex_);
    const auto found = transports_.find(device.index());
    return found != transports_.end() ? found->second.get() : nullptr;
  };
  if (cuda::DeviceTransport* const found = find()) return *found;
  // It waits for other ranks, so mutex_ is free meanwhile.
  const std::lock_guard making(making_);
  if (cuda::DeviceTransport* const found = find()) return *found;  // another thread's
  DeviceTransportPtr made;
  try {
    // Not the caller's, which may be captured.
    const c10::StreamGuard beside(own_stream(device, /*peer=*/-1));
    made = make_device_transport(store_, *communicator(), *options_, device);
  } catch (const std::exception&) {
    check();  // throws the reason if a watchdog ended the group
    throw;
  }
  const std::lock_guard lock(mutex_);
  if (is_aborted_) made->abort();
  return *(transports_[device.index()] = std::move(made));
}

cuda::DeviceTransport& DeviceGroup::transport_of_call(c10::Device device) {
  cuda::DeviceTransport& found = transport(device);
  // A kernel may have given up since the watchdog's last look, which tells why.
  if (!has_awaited_reason_ && found.may_be_aborted()) {
    has_awaited_reason_ = true;  // once, if none comes
    await_reason([] { return true; });
  }
  found.set_timeout(std::min(options_->timeout, kLongestTimeout));  // of set_timeout()
  return found;
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
  for (const auto& operation : operations_) operation->mark_aborted();
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

void DeviceGroup::throw_aborted(const char* title, const std::string& detail) {
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

bool DeviceGroup::has_another_aborted() {
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
  std::deque<std::shared_ptr<DeviceOperation>> operations;
  {
    const std::lock_guard lock(mutex_);
    operations = operations_;
  }
  for (const auto& operation : operations) {
    for (bool has_aborted = false; !operation->is_over();
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

// Releases completed operations. The device is queried only for those that still hold tensors. Of
// the others that nothing else references, the last one of each stream is sufficient. With order_,
// so that nobody else adds or removes one.
void DeviceGroup::keep(const std::shared_ptr<DeviceOperation>& operation) {
  // A tensor that is freed may need the GIL, whose holder may wait for mutex_.
  std::vector<std::shared_ptr<DeviceOperation>> released;
  for (const auto& earlier : operations_)
    if (earlier->has_tensors() && !earlier->is_over()) break;
  const std::lock_guard lock(mutex_);
  std::vector<c10::Stream> later{operation->stream()};
  const auto is_told_of = [&](const auto& earlier) {
    if (earlier->is_known_to_be_over()) return true;
    if (earlier.use_count() > 1 || earlier->has_tensors()) return false;
    if (std::find(later.begin(), later.end(), earlier->stream()) != later.end()) return true;
    later.push_back(earlier->stream());
    return false;
  };
  for (auto one = operations_.rbegin(); one != operations_.rend(); ++one)
    if (is_told_of(*one)) released.push_back(std::exchange(*one, nullptr));
  std::erase(operations_, nullptr);
  operations_.push_back(operation);
  if (is_aborted_) operation->mark_aborted();
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
                      const cuda::StreamContext& stream, const std::function<void()>& finish) {
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
  transport.plan(call, stream.capture != 0);
  recorded_.push_back(engine->record_on_device(recorder::event_of(call, 0)));
  ending_on_failure([&] { return describe(call); },
                    [&] {
                      engine->stats().count(call.op, transport.enqueue(call, stream));
                      if (finish) finish();
                    });
}

std::shared_ptr<DeviceOperation> DeviceGroup::enqueue(c10::Device device, bool is_async, int peer,
                                                      Tensors kept, const Body& body) {
  const std::lock_guard order(order_);
  check();
  const c10::Stream home = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const c10::Stream stream = is_async ? own_stream(device, peer) : home;
  const c10::StreamGuard guard(stream);
  const DeviceContext context(device);
  cuda::DeviceTransport& used = transport_of_call(device);  // before the stream may be captured
  if (stream != home) DeviceEvent::record(home).block(stream);
  cuda::StreamContext on_stream;
  if (has_driver_for(device)) on_stream = cuda::StreamContext::of(handle_of(stream));
  // Nothing can be launched in it, on this rank alone: the group goes on.
  if (on_stream.capture == cuda::kFailedCapture)
    throw std::runtime_error(
        "ringcomm: the capture of this stream had failed before this call: end it, and begin "
        "again");
  std::shared_ptr<const cuda::Event> end;
  recorded_.clear();
  try {
    if (body(used, on_stream)) end = used.last_end();
    const char* const why = used.why_staged();
    if (std::exchange(told_why_staged_, why) != why)
      TORCH_WARN("ringcomm: calls copy some tensors of GPUs, because ", why);
  } catch (...) {
    if (communicator()->failure().has_failed()) {
      const std::lock_guard lock(mutex_);
      lost_.insert(lost_.end(), kept.begin(), kept.end());
    }
    throw;
  }
  auto operation = std::make_shared<DeviceOperation>(
      stream, home, on_stream.capture != 0,
      end != nullptr ? DeviceEvent(end) : DeviceEvent::record(stream), std::move(kept), used,
      used.take_outcomes(), std::exchange(recorded_, {}));
  keep(operation);
  return operation;
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
            [&](cuda::DeviceTransport& transport, const cuda::StreamContext& stream) {
              run(call, transport, stream);
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
                      [&](cuda::DeviceTransport& transport, const cuda::StreamContext& stream) {
                        for (const TensorCall& item : calls) {  // all are refused, or none
                          Collective planned = item.call;
                          if (calls.size() > 1) transport.plan(planned, stream.capture != 0);
                        }
                        for (const TensorCall& item : calls)
                          run(item.call, transport, stream, item.finish);
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
  const auto post = [&](cuda::DeviceTransport& transport, const cuda::StreamContext& stream) {
    for (const cuda::P2pMessage& message : messages)
      recorded_.push_back(communicator()->record_on_device(
          {.seq = static_cast<std::uint64_t>(message.tag),
           .num_bytes = message.num_bytes,
           .peer = message.peer,
           .op = message.is_send ? OpKind::kSend : OpKind::kRecv}));
    transport.exchange(messages, stream);
    for (const DeviceMessage& call : calls) {
      if (!call.item.finish) continue;
      call.item.finish();
      is_last = false;
    }
  };
  return enqueue_work(*calls[0].info.device, info, inputs, std::move(kept), std::move(results),
                      [&](cuda::DeviceTransport& transport, const cuda::StreamContext& stream) {
                        transport.check_messages(messages);
                        ending_on_failure([] { return "sends and receives"; },
                                          [&] { post(transport, stream); });
                        return is_last;
                      });
}

}  // namespace ringcomm
