#include "cuda/messages/engine.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <exception>

#include "bindings/python_errors.h"
#include "core/errors.h"

namespace ringcomm {

DeviceEngine::DeviceEngine(c10::intrusive_ptr<c10d::Backend> backend, int rank, int world_size,
                           c10::Device device)
    : backend_(std::move(backend)), rank_(rank), world_size_(world_size), device_(device) {}

DeviceEngine::~DeviceEngine() {
  // The backend ends before the memory that its messages may still use.
  without_gil([&] {
    posted_.clear();
    try {
      if (backend_ != nullptr && !is_aborted_) backend_->shutdown();
    } catch (const std::exception&) {
      // It ends with its object, then.
    }
    backend_.reset();
  });
}

at::Tensor DeviceEngine::bytes(void* data, std::size_t num_bytes) const {
  return at::for_blob(data, {static_cast<std::int64_t>(num_bytes)})
      .options(at::TensorOptions(at::kByte).device(device_))
      .target_device(device_)
      .make_tensor();
}

void DeviceEngine::send(const void* data, std::size_t num_bytes, int peer, int tag) {
  if (num_bytes == 0) return;
  next_.push_back({true, bytes(const_cast<void*>(data), num_bytes), peer, tag});
  sent_bytes_ += num_bytes;
}

void DeviceEngine::recv(void* data, std::size_t num_bytes, int peer, int tag) {
  if (num_bytes > 0) next_.push_back({false, bytes(data, num_bytes), peer, tag});
}

DeviceEngine::Works DeviceEngine::start(const std::vector<Message>& messages) {
  Works works;
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
    const std::exception_ptr error = std::current_exception();
    try {
      if (is_coalesced) backend_->endCoalescing();
    } catch (...) {  // of the same cause
    }
    std::rethrow_exception(error);
  }
  if (is_coalesced) {
    works.clear();  // they are parts of the one that follows
    add(backend_->endCoalescing());
  }
  return works;
}

// Starts without the lock: a backend may wait there until a peer connects, which abort() must end.
template <class Start>
DeviceEngine::Batch DeviceEngine::begin(const Start& start) {
  {
    const std::lock_guard lock(mutex_);
    if (is_aborted_)
      throw Error({.kind = ErrorKind::kAborted, .rank = rank_},
                  "ringcomm: the messages of this group's device tensors have been aborted");
  }
  Works works = start();
  Batch batch;
  const std::lock_guard lock(mutex_);
  batch.place = posted_.insert(posted_.end(), std::move(works));
  batch.is_posted = true;
  return batch;
}

DeviceEngine::Batch DeviceEngine::post() {
  const std::vector<Message> messages = std::exchange(next_, {});
  if (messages.empty()) return {};
  return begin([&] { return start(messages); });
}

DeviceEngine::Batch DeviceEngine::all_to_all(const Parts& sent, const Parts& received) {
  std::vector<at::Tensor> inputs, outputs;
  for (int peer = 0; peer < world_size_; ++peer) {
    const auto place = static_cast<std::size_t>(peer);
    inputs.push_back(bytes(sent[place].data, sent[place].num_bytes));
    outputs.push_back(bytes(received[place].data, received[place].num_bytes));
    if (peer != rank_) sent_bytes_ += sent[place].num_bytes;
  }
  return begin([&] { return Works{backend_->alltoall(outputs, inputs)}; });
}

DeviceEngine::Batch DeviceEngine::all_gather(const void* input, std::size_t num_bytes,
                                             void* output) {
  const auto num_ranks = static_cast<std::size_t>(world_size_);
  at::Tensor from = bytes(const_cast<void*>(input), num_bytes);
  at::Tensor to = bytes(output, num_ranks * num_bytes);
  sent_bytes_ += (num_ranks - 1) * num_bytes;
  return begin([&] { return Works{backend_->_allgather_base(to, from)}; });
}

DeviceEngine::Batch DeviceEngine::broadcast(void* data, std::size_t num_bytes, int root) {
  std::vector<at::Tensor> tensors{bytes(data, num_bytes)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  if (rank_ == root) sent_bytes_ += static_cast<std::size_t>(world_size_ - 1) * num_bytes;
  return begin([&] { return Works{backend_->broadcast(tensors, options)}; });
}

void DeviceEngine::wait(Batch& batch) {
  if (!std::exchange(batch.is_posted, false)) return;
  for (const auto& work : *batch.place) work->wait();
  const std::lock_guard lock(mutex_);
  waited_for_.insert(waited_for_.end(), batch.place->begin(), batch.place->end());
  posted_.erase(batch.place);
}

void DeviceEngine::post_and_wait() {
  Batch batch = post();
  wait(batch);
}

std::byte* DeviceEngine::stage(std::size_t num_bytes) {
  staging_.push_back(at::empty({static_cast<std::int64_t>(num_bytes)},
                               at::TensorOptions(at::kByte).device(device_)));
  return static_cast<std::byte*>(staging_.back().data_ptr());
}

void DeviceEngine::copy(void* to, const void* from, std::size_t num_bytes) const {
  if (num_bytes == 0 || to == from) return;
  bytes(to, num_bytes).copy_(bytes(const_cast<void*>(from), num_bytes), /*non_blocking=*/true);
}

void DeviceEngine::finish() {
  staging_.clear();
  sent_bytes_ = 0;
}

void DeviceEngine::abandon() {
  next_.clear();
  abandoned_.insert(abandoned_.end(), staging_.begin(), staging_.end());
  waited_for_.clear();
  finish();
}

void DeviceEngine::abort() noexcept {
  if (backend_ == nullptr) return;
  std::list<Works> posted;
  {
    const std::lock_guard lock(mutex_);
    if (is_aborted_.exchange(true)) return;
    posted = posted_;
  }
  for (const Works& works : posted) {
    try {
      for (const auto& work : works) work->abort();
    } catch (const std::exception&) {
      break;  // this backend ends all works together, or none
    }
  }
  try {
    backend_->abort();
  } catch (const std::exception&) {
    // As above: a work that cannot be ended ends with its connection.
  }
}

}  // namespace ringcomm
