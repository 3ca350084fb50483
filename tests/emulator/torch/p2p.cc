#include "emulator/torch/p2p.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "emulator/torch/memory.h"
#include "emulator/torch/streams.h"

namespace ringcomm::emulator {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

milliseconds max_timeout() {
  const char* text = std::getenv("RINGCOMM_EMULATOR_P2P_TIMEOUT_MS");
  return milliseconds(text != nullptr ? std::stoi(text) : 20'000);
}

constexpr auto kPollInterval = std::chrono::microseconds(200);

/// Why a group moves no bytes any more; shared with what its streams still have to do.
class Breakage {
 public:
  /// The first reason stays.
  void set(const std::exception_ptr& reason) {
    const std::lock_guard lock(mutex_);
    if (reason_ == nullptr) reason_ = reason;
  }
  void check() const {
    const std::lock_guard lock(mutex_);
    if (reason_ != nullptr) std::rethrow_exception(reason_);
  }

 private:
  mutable std::mutex mutex_;
  std::exception_ptr reason_;
};

/// One message of this rank, the `number`-th from or to that peer.
struct Message {
  bool is_send;
  int peer;
  std::uint64_t number;
  void* data;
  std::size_t num_bytes;
};

/// The stream's part of one work: moves its messages through the store.
class Exchange {
 public:
  Exchange(c10::intrusive_ptr<c10d::Store> store, int rank, milliseconds timeout,
           std::shared_ptr<Breakage> breakage, std::vector<Message> messages)
      : store_(std::move(store)),
        rank_(rank),
        timeout_(timeout),
        breakage_(std::move(breakage)),
        messages_(std::move(messages)) {}

  std::shared_future<void> outcome() { return outcome_.get_future().share(); }

  /// Called once, by the stream.
  void run() {
    try {
      move_messages();
      outcome_.set_value();
    } catch (...) {
      breakage_->set(std::current_exception());
      outcome_.set_exception(std::current_exception());
    }
  }

 private:
  void move_messages() {
    deadline_ = Clock::now() + timeout_;
    for (const Message& message : messages_) {
      if (!message.is_send) continue;
      const auto* bytes = static_cast<const std::uint8_t*>(message.data);
      store_->set(key_of(message), std::vector(bytes, bytes + message.num_bytes));
    }
    for (const Message& message : messages_) {
      if (message.is_send) continue;
      const std::vector<std::uint8_t> bytes = get(key_of(message), message);
      TORCH_CHECK(bytes.size() == message.num_bytes, "emup2p: rank ", message.peer, " sends ",
                  bytes.size(), " bytes where rank ", rank_, " receives ", message.num_bytes);
      if (!bytes.empty()) std::memcpy(message.data, bytes.data(), bytes.size());
      store_->set(key_of(message) + "/taken", std::vector<std::uint8_t>{1});
    }
    for (const Message& message : messages_) {
      if (!message.is_send) continue;
      get(key_of(message) + "/taken", message);
      store_->deleteKey(key_of(message));
      store_->deleteKey(key_of(message) + "/taken");
    }
  }

  std::string key_of(const Message& message) const {
    const int from = message.is_send ? rank_ : message.peer;
    const int to = message.is_send ? message.peer : rank_;
    return "emup2p/" + std::to_string(from) + ">" + std::to_string(to) + "/" +
           std::to_string(message.number);
  }

  std::vector<std::uint8_t> get(const std::string& key, const Message& message) {
    while (true) {
      breakage_->check();
      if (store_->check({key})) return store_->get(key);
      TORCH_CHECK_WITH(DistBackendError, Clock::now() < deadline_, "emup2p: rank ", rank_,
                       message.is_send ? " sends to rank " : " receives from rank ", message.peer,
                       ", which did not take part within ", timeout_.count(), " ms");
      std::this_thread::sleep_for(kPollInterval);
    }
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const milliseconds timeout_;
  const std::shared_ptr<Breakage> breakage_;
  const std::vector<Message> messages_;
  Clock::time_point deadline_;
  std::promise<void> outcome_;
};

class P2pWork final : public c10d::Work {
 public:
  P2pWork(int rank, c10d::OpType op_type, std::shared_future<void> outcome, c10::Stream stream,
          std::vector<at::Tensor> received)
      : Work(rank, op_type),
        outcome_(std::move(outcome)),
        received_(std::move(received)),
        done_(kEmulatedGpu),
        future_(
            c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{stream.device()})) {
    done_.record(stream);
    const c10::StreamGuard guard(stream);  // for continuations of the future
    future_->markCompleted(at::IValue(received_));
  }

  bool isCompleted() override { return done_.query() || exception() != nullptr; }
  bool isSuccess() const override { return done_.query() && exception() == nullptr; }
  std::exception_ptr exception() const override {
    if (outcome_.wait_for(milliseconds(0)) != std::future_status::ready) return nullptr;
    try {
      outcome_.get();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  bool wait(milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    if (const std::exception_ptr reason = exception()) std::rethrow_exception(reason);
    done_.block(current_stream(done_.device_index()));
  }
  std::vector<at::Tensor> result() override { return received_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const std::shared_future<void> outcome_;
  const std::vector<at::Tensor> received_;
  c10::Event done_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// Sends, receives and some collectives of tensors of emulated GPUs, "emup2p": NCCL's as far as its
/// users can tell.
///
/// Calls return at once. Messages run on the group's own stream of the device, which waits for what
/// the current stream was given before; Work::wait() makes the current stream wait. A send's stream
/// continues when the receiver has the bytes. So two ranks that both send first, outside
/// startCoalescing() and endCoalescing(), deadlock; messages between those two calls run together.
/// Between two ranks messages match in the order of the calls; tags mean nothing.
///
/// The bytes travel through the group's store. What does not arrive within the group's timeout, or
/// RINGCOMM_EMULATOR_P2P_TIMEOUT_MS (20,000) if that is less, breaks the group: works that are not
/// done fail, and so do new ones.
class EmulatedP2p final : public c10d::Backend {
 public:
  EmulatedP2p(c10::intrusive_ptr<c10d::Store> store, int rank, int size, milliseconds timeout)
      : Backend(rank, size), store_(std::move(store)), timeout_(std::min(timeout, max_timeout())) {}

  const std::string getBackendName() const override { return "emup2p"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    TORCH_CHECK(!coalesced_.has_value(), "emup2p: calls are being coalesced already");
    coalesced_.emplace();
  }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    TORCH_CHECK(coalesced_.has_value(), "emup2p: endCoalescing() without startCoalescing()");
    Batch batch = std::move(*coalesced_);
    coalesced_.reset();
    if (batch.messages.empty()) return nullptr;
    const c10::Device device = batch.tensors.front().device();
    return submit(std::move(batch), device, c10d::OpType::COALESCED);
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int) override {
    return send_or_receive(true, tensors, peer);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int) override {
    return send_or_receive(false, tensors, peer);
  }
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions&) override {
    const auto num_ranks = static_cast<std::size_t>(size_);
    TORCH_CHECK_VALUE(inputs.size() == num_ranks && outputs.size() == num_ranks,
                      "emup2p: a tensor for each rank");
    return collect(outputs.front().device(), c10d::OpType::ALLTOALL, [&](int peer, Batch& batch) {
      const auto place = static_cast<std::size_t>(peer);
      add(true, inputs[place], peer, batch);  // of no bytes as well, as NCCL does
      add(false, outputs[place], peer, batch);
    });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    const at::Tensor& tensor = tensors.front();
    return collect(tensor.device(), c10d::OpType::BROADCAST, [&](int peer, Batch& batch) {
      if (peer == rank_) return;
      if (rank_ == options.rootRank) add(true, tensor, peer, batch);
      if (peer == options.rootRank) add(false, tensor, peer, batch);
    });
  }
  void abort() override {
    breakage_->set(std::make_exception_ptr(
        C10_BUILD_ERROR(DistBackendError, "emup2p: the group was aborted")));
  }
  void shutdown() override { abort(); }

 private:
  struct Batch {
    std::vector<Message> messages;
    std::vector<at::Tensor> tensors;
    std::vector<at::Tensor> received;
  };

  void add(bool is_send, const at::Tensor& tensor, int peer, Batch& batch) {
    TORCH_CHECK_VALUE(tensor.device().type() == kEmulatedGpu,
                      "emup2p: tensors of emulated GPUs only, got one on ", tensor.device());
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "emup2p: tensors must be contiguous");
    TORCH_CHECK_VALUE(0 <= peer && peer < size_, "emup2p: no rank ", peer, " in this group");
    TORCH_CHECK_VALUE(batch.tensors.empty() || batch.tensors.front().device() == tensor.device(),
                      "emup2p: calls that are coalesced have tensors on one device");
    batch.messages.push_back({.is_send = is_send,
                              .peer = peer,
                              .number = num_messages_[{is_send, peer}]++,
                              .data = const_cast<void*>(tensor.const_data_ptr()),
                              .num_bytes = tensor.nbytes()});
    batch.tensors.push_back(tensor);
    if (!is_send) batch.received.push_back(tensor);
  }

  c10::intrusive_ptr<c10d::Work> send_or_receive(bool is_send, std::vector<at::Tensor>& tensors,
                                                 int peer) {
    breakage_->check();
    TORCH_CHECK_VALUE(tensors.size() == 1, "emup2p: one tensor a call, got ", tensors.size());
    Batch alone;
    add(is_send, tensors.front(), peer, coalesced_.has_value() ? *coalesced_ : alone);
    if (coalesced_.has_value()) return nullptr;
    return submit(std::move(alone), tensors.front().device(),
                  is_send ? c10d::OpType::SEND : c10d::OpType::RECV);
  }

  /// A collective of the messages that `add_messages` makes for each rank.
  template <class AddMessages>
  c10::intrusive_ptr<c10d::Work> collect(c10::Device device, c10d::OpType op_type,
                                         const AddMessages& add_messages) {
    breakage_->check();
    TORCH_CHECK(!coalesced_.has_value(), "emup2p: collectives cannot be coalesced");
    Batch batch;
    for (int peer = 0; peer < size_; ++peer) add_messages(peer, batch);
    return submit(std::move(batch), device, op_type);
  }

  c10::intrusive_ptr<c10d::Work> submit(Batch batch, c10::Device on, c10d::OpType op_type) {
    const c10::DeviceIndex device = on.index();
    const c10::Stream stream = stream_on(device);
    TORCH_CHECK(!is_capturing(current_stream(device)), "emup2p: cannot be captured");
    wait_for_stream(stream, current_stream(device));
    for (const at::Tensor& tensor : batch.tensors)
      record_stream(tensor.storage().data_ptr(), stream);
    auto exchange =
        std::make_shared<Exchange>(store_, rank_, timeout_, breakage_, std::move(batch.messages));
    std::shared_future<void> outcome = exchange->outcome();
    launch_host_function(stream, [exchange] { exchange->run(); });
    return c10::make_intrusive<P2pWork>(rank_, op_type, std::move(outcome), stream,
                                        std::move(batch.received));
  }

  c10::Stream stream_on(c10::DeviceIndex device) {
    const auto found = streams_.find(device);
    if (found != streams_.end()) return found->second;
    return streams_.emplace(device, stream_from_pool(device)).first->second;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<Breakage> breakage_ = std::make_shared<Breakage>();
  std::map<std::pair<bool, int>, std::uint64_t> num_messages_;  // by direction and peer
  std::map<c10::DeviceIndex, c10::Stream> streams_;
  std::optional<Batch> coalesced_;  // while calls are
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> create_p2p(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                             int size, std::chrono::milliseconds timeout) {
  return c10::make_intrusive<EmulatedP2p>(store, rank, size, timeout);
}

}  // namespace ringcomm::emulator
