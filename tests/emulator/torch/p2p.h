#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "emulator/torch/device.h"

namespace ringcomm::emulator {

using std::chrono::milliseconds;

/// What carries a group's messages, by way of its store; shared with what its streams have to do.
class P2pTransport {
 public:
  struct Message {
    bool is_send;
    int peer;
    std::string key;
    void* data;
    std::size_t num_bytes;
  };

  P2pTransport(c10::intrusive_ptr<c10d::Store> store, int rank, milliseconds timeout)
      : store_(std::move(store)), rank_(rank) {
    const char* text = std::getenv("RINGCOMM_EMULATOR_P2P_TIMEOUT_MS");
    timeout_ = std::min(timeout, milliseconds(text != nullptr ? std::stoi(text) : 20'000));
  }

  /// Moves messages that progress together. Where they do not, the group is broken.
  void move(const std::vector<Message>& messages, std::atomic<bool>& is_done) {
    try {
      const auto deadline = std::chrono::steady_clock::now() + timeout_;
      for (const Message& message : messages) {
        if (!message.is_send) continue;
        const auto* bytes = static_cast<const std::uint8_t*>(message.data);
        store_->set(message.key, std::vector(bytes, bytes + message.num_bytes));
      }
      for (const Message& message : messages) {
        if (message.is_send) continue;
        const std::vector<std::uint8_t> bytes = get(message.key, message, deadline);
        TORCH_CHECK(bytes.size() == message.num_bytes, "emup2p: rank ", message.peer, " sends ",
                    bytes.size(), " bytes where rank ", rank_, " receives ", message.num_bytes);
        if (!bytes.empty()) std::memcpy(message.data, bytes.data(), bytes.size());
        store_->set(message.key + "/taken", std::vector<std::uint8_t>{1});
      }
      for (const Message& message : messages) {
        if (!message.is_send) continue;
        get(message.key + "/taken", message, deadline);
        store_->deleteKey(message.key);
        store_->deleteKey(message.key + "/taken");
      }
      is_done = true;
    } catch (...) {
      fail(std::current_exception());
    }
  }

  /// Why the group moves no bytes any more; null if it does. The first reason stays.
  std::exception_ptr failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  void fail(const std::exception_ptr& failure) {
    const std::lock_guard lock(mutex_);
    if (failure_ == nullptr) failure_ = failure;
  }
  void check() {
    if (const std::exception_ptr failed = failure()) std::rethrow_exception(failed);
  }

 private:
  std::vector<std::uint8_t> get(const std::string& key, const Message& message,
                                std::chrono::steady_clock::time_point deadline) {
    for (;;) {
      check();
      if (store_->check({key})) return store_->get(key);
      TORCH_CHECK_WITH(DistBackendError, std::chrono::steady_clock::now() < deadline,
                       "emup2p: rank ", rank_,
                       message.is_send ? " sends to rank " : " receives from rank ", message.peer,
                       ", which did not take part within ", timeout_.count(), " ms");
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  milliseconds timeout_;
  std::mutex mutex_;
  std::exception_ptr failure_;
};

class P2pWork final : public c10d::Work {
 public:
  P2pWork(int rank, c10d::OpType op_type, std::shared_ptr<P2pTransport> transport,
          std::shared_ptr<std::atomic<bool>> is_done, c10::Stream stream)
      : Work(rank, op_type),
        transport_(std::move(transport)),
        is_done_(std::move(is_done)),
        end_(kEmulatedGpu) {
    end_.record(stream);
  }

  bool isCompleted() override { return end_.query() || exception() != nullptr; }
  bool isSuccess() const override { return end_.query() && *is_done_; }
  std::exception_ptr exception() const override {
    return *is_done_ ? nullptr : transport_->failure();
  }
  bool wait(milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    if (const std::exception_ptr failed = exception()) std::rethrow_exception(failed);
    end_.block(current_stream(end_.device_index()));
  }

 private:
  const std::shared_ptr<P2pTransport> transport_;
  const std::shared_ptr<std::atomic<bool>> is_done_;
  c10::Event end_;
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
/// What does not arrive within the group's timeout, or RINGCOMM_EMULATOR_P2P_TIMEOUT_MS (20,000) if
/// that is less, breaks the group: works that are not done fail, and so do new ones.
class EmulatedP2p final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  EmulatedP2p(c10::intrusive_ptr<c10d::Store> store, int rank, int size, milliseconds timeout)
      : Backend(rank, size),
        transport_(std::make_shared<P2pTransport>(std::move(store), rank, timeout)) {}

  const std::string getBackendName() const override { return "emup2p"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { is_coalescing_ = true; }
  WorkPtr endCoalescing() override {
    is_coalescing_ = false;
    return batch_.messages.empty() ? nullptr : submit(c10d::OpType::COALESCED);
  }
  WorkPtr send(Tensors& tensors, int peer, int) override {
    return add(true, tensors.at(0), peer) ? submit(c10d::OpType::SEND) : nullptr;
  }
  WorkPtr recv(Tensors& tensors, int peer, int) override {
    return add(false, tensors.at(0), peer) ? submit(c10d::OpType::RECV) : nullptr;
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return exchange(inputs, outputs, c10d::OpType::ALLTOALL);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto root = static_cast<int>(options.rootRank);
    if (rank_ != root) add(false, tensors.at(0), root);
    for (int peer = 0; peer < size_; ++peer)
      if (rank_ == root && peer != root) add(true, tensors.at(0), peer);
    return submit(c10d::OpType::BROADCAST);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reduce(Tensors(static_cast<std::size_t>(size_), tensors.at(0)), tensors.at(0),
                  options.reduceOp, c10d::OpType::ALLREDUCE);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Tensors inputs(static_cast<std::size_t>(size_));
    inputs.at(static_cast<std::size_t>(options.rootRank)) = tensors.at(0);
    return reduce(inputs, rank_ == options.rootRank ? tensors.at(0) : at::Tensor(),
                  options.reduceOp, c10d::OpType::REDUCE);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return reduce(inputs.at(0), outputs.at(0), options.reduceOp, c10d::OpType::REDUCE_SCATTER);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return reduce(input.chunk(size_), output, options.reduceOp, c10d::OpType::REDUCE_SCATTER);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions&) override {
    return exchange(Tensors(static_cast<std::size_t>(size_), inputs.at(0)), outputs.at(0),
                    c10d::OpType::ALLGATHER);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    return exchange(Tensors(static_cast<std::size_t>(size_), input), output.chunk(size_),
                    c10d::OpType::ALLGATHER);
  }
  void abort() override {
    transport_->fail(std::make_exception_ptr(
        C10_BUILD_ERROR(DistBackendError, "emup2p: the group was aborted")));
  }
  void shutdown() override { abort(); }

 private:
  struct Batch {
    std::vector<P2pTransport::Message> messages;
    Tensors tensors;
  };

  /// Each rank gets from each peer what that has for it, of no bytes too, as NCCL does.
  WorkPtr exchange(const Tensors& inputs, const Tensors& outputs, c10d::OpType op_type) {
    for (int peer = 0; peer < size_; ++peer) {
      add(true, inputs.at(static_cast<std::size_t>(peer)), peer);
      add(false, outputs.at(static_cast<std::size_t>(peer)), peer);
    }
    return submit(op_type);
  }

  /// Each rank gets the inputs for it of all ranks, where they are defined, and `output` is what
  /// they reduce to, in the order of the ranks.
  WorkPtr reduce(const Tensors& inputs, const at::Tensor& output, const c10d::ReduceOp& op,
                 c10d::OpType op_type) {
    TORCH_CHECK_VALUE(op.op_ <= c10d::ReduceOp::MAX, "emup2p: no bitwise reductions");
    Tensors received;
    for (int peer = 0; peer < size_; ++peer) {
      if (const at::Tensor& input = inputs.at(static_cast<std::size_t>(peer)); input.defined())
        add(true, input, peer);
      if (!output.defined()) continue;
      received.push_back(at::empty_like(output));
      add(false, received.back(), peer);
    }
    if (!output.defined()) return submit(op_type);
    for (at::Tensor& tensor : received) tensor = host_view(tensor);
    return submit(op_type, [received, to = host_view(output), op = op.op_] {
      const bool is_short = to.is_floating_point() && to.element_size() < 4;
      at::Tensor result = is_short ? received[0].to(at::kFloat) : received[0];
      const auto size = static_cast<std::int64_t>(received.size());
      for (std::size_t peer = 1; peer < received.size(); ++peer)
        result = op == c10d::ReduceOp::PRODUCT ? result.mul_(received[peer])
                 : op == c10d::ReduceOp::MIN   ? at::minimum(result, received[peer])
                 : op == c10d::ReduceOp::MAX   ? at::maximum(result, received[peer])
                                               : result.add_(received[peer]);
      if (op == c10d::ReduceOp::AVG)
        result.is_floating_point() ? result.div_(size) : result.div_(size, "trunc");
      to.copy_(result);
    });
  }

  static at::Tensor host_view(const at::Tensor& tensor) {
    return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(),
                         tensor.options().device(at::kCPU));
  }

  /// Whether it is to be submitted at once.
  bool add(bool is_send, const at::Tensor& tensor, int peer) {
    transport_->check();
    TORCH_CHECK_VALUE(tensor.device().type() == kEmulatedGpu && tensor.is_contiguous(),
                      "emup2p: contiguous tensors of emulated GPUs only, got one on ",
                      tensor.device());
    TORCH_CHECK_VALUE(0 <= peer && peer < size_, "emup2p: no rank ", peer, " in this group");
    const int from = is_send ? rank_ : peer, to = is_send ? peer : rank_;
    const std::string key = "emup2p/" + std::to_string(from) + ">" + std::to_string(to) + "/" +
                            std::to_string(num_messages_[{is_send, peer}]++);
    void* data = const_cast<void*>(tensor.const_data_ptr());
    batch_.messages.push_back({is_send, peer, key, data, tensor.nbytes()});
    batch_.tensors.push_back(tensor);
    return !is_coalescing_;
  }

  /// Moves the batch, and then calls `next`, which may use the batch's memory.
  WorkPtr submit(c10d::OpType op_type, std::function<void()> next = {}) {
    Batch batch = std::exchange(batch_, {});
    const c10::DeviceIndex device = batch.tensors.at(0).get_device();
    if (!stream_.has_value()) stream_ = stream_from_pool(device);
    TORCH_CHECK_VALUE(device == stream_->device_index(), "emup2p: a group has one device");
    TORCH_CHECK(!is_capturing(current_stream(device)), "emup2p: cannot be captured");
    wait_for_stream(*stream_, current_stream(device));
    for (const at::Tensor& tensor : batch.tensors)
      record_stream(tensor.storage().data_ptr(), *stream_);
    auto is_done = std::make_shared<std::atomic<bool>>();
    launch(*stream_, [transport = transport_, messages = std::move(batch.messages), is_done,
                      next = std::move(next)] {
      transport->move(messages, *is_done);
      if (next && *is_done) next();
    });
    return c10::make_intrusive<P2pWork>(rank_, op_type, transport_, is_done, *stream_);
  }

  const std::shared_ptr<P2pTransport> transport_;
  std::map<std::pair<bool, int>, std::uint64_t> num_messages_;  // by direction and peer
  std::optional<c10::Stream> stream_;
  Batch batch_;  // of the next work
  bool is_coalescing_ = false;
};

}  // namespace ringcomm::emulator
