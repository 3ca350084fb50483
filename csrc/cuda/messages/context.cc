#include "cuda/messages/context.h"

#include <ATen/ops/empty.h>

#include <exception>

#include "bindings/python_errors.h"
#include "core/errors.h"
#include "cuda/messages/operators.h"

namespace ringcomm {

DeviceMessageContext::~DeviceMessageContext() {
  // The backend ends before the memory that its messages may still use.
  without_gil([&] {
    try {
      if (backend_ != nullptr && !is_aborted_) backend_->shutdown();
    } catch (const std::exception&) {
      // It ends with its object, then.
    }
    backend_.reset();
  });
}

void DeviceMessageContext::check() const {
  if (is_aborted_)
    throw Error({.kind = ErrorKind::kAborted, .rank = rank_},
                "ringcomm: the messages of this group's device tensors have been aborted");
}

at::Tensor DeviceMessageContext::bytes(const void* data, std::size_t num_bytes) const {
  return device_array(data, num_bytes, at::kByte, device_);
}

void DeviceMessageContext::send(const void* data, std::size_t num_bytes, int peer, int tag) {
  if (num_bytes == 0) return;
  next_.push_back({true, bytes(data, num_bytes), peer, tag});
  sent_bytes_ += num_bytes;
}

void DeviceMessageContext::recv(void* data, std::size_t num_bytes, int peer, int tag) {
  if (num_bytes > 0) next_.push_back({false, bytes(data, num_bytes), peer, tag});
}

DeviceMessageContext::Batch DeviceMessageContext::post() {
  const std::vector<Message> messages = std::exchange(next_, {});
  if (messages.empty()) return {};
  check();
  Batch works;
  const auto add = [&](c10::intrusive_ptr<c10d::Work> work) {
    if (work != nullptr) works.push_back(std::move(work));
  };
  const bool is_coalesced = backend_->supportsCoalescing();
  if (is_coalesced) backend_->startCoalescing();
  try {
    for (const Message& message : messages) {
      std::vector<at::Tensor> tensors{message.data};
      add(message.is_send ? backend_->send(tensors, message.peer, message.tag)
                          : backend_->recv(tensors, message.peer, message.tag));
    }
  } catch (...) {
    try {
      if (is_coalesced) backend_->endCoalescing();
    } catch (...) {  // of the same cause
    }
    throw;
  }
  if (is_coalesced) {
    works.clear();  // they are parts of the one that follows
    add(backend_->endCoalescing());
  }
  return works;
}

DeviceMessageContext::Batch DeviceMessageContext::all_to_all(const Parts& sent,
                                                             const Parts& received) {
  check();
  std::vector<at::Tensor> inputs, outputs;
  for (const Part& part : sent) inputs.push_back(bytes(part.data, part.num_bytes));
  for (const Part& part : received) outputs.push_back(bytes(part.data, part.num_bytes));
  for (int peer = 0; peer < world_size_; ++peer)
    if (peer != rank_) sent_bytes_ += sent[static_cast<std::size_t>(peer)].num_bytes;
  return {backend_->alltoall(outputs, inputs)};
}

DeviceMessageContext::Batch DeviceMessageContext::broadcast(void* data, std::size_t num_bytes,
                                                            int root) {
  check();
  std::vector<at::Tensor> tensors{bytes(data, num_bytes)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  if (rank_ == root) sent_bytes_ += static_cast<std::size_t>(world_size_ - 1) * num_bytes;
  return {backend_->broadcast(tensors, options)};
}

void DeviceMessageContext::wait(Batch& batch) {
  for (const auto& work : std::exchange(batch, {})) {
    work->wait();
    outcomes_.push_back([work] { return work->exception(); });
  }
}

std::byte* DeviceMessageContext::stage(std::size_t num_bytes) {
  staging_.push_back(at::empty({static_cast<std::int64_t>(num_bytes)},
                               at::TensorOptions(at::kByte).device(device_)));
  return static_cast<std::byte*>(staging_.back().data_ptr());
}

void DeviceMessageContext::copy(void* to, const void* from, std::size_t num_bytes) const {
  if (num_bytes == 0 || to == from) return;
  bytes(to, num_bytes).copy_(bytes(from, num_bytes), /*non_blocking=*/true);
}

std::uint64_t DeviceMessageContext::finish() {
  staging_.clear();
  return std::exchange(sent_bytes_, 0);
}

void DeviceMessageContext::abandon() {
  next_.clear();
  abandoned_.insert(abandoned_.end(), staging_.begin(), staging_.end());
  outcomes_.clear();
  finish();
}

void DeviceMessageContext::abort() noexcept {
  if (backend_ == nullptr || is_aborted_.exchange(true)) return;
  try {
    backend_->abort();
  } catch (const std::exception&) {
    // Its messages end with their connections, then.
  }
}

}  // namespace ringcomm
