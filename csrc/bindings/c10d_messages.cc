#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <utility>

#include "bindings/devices.h"
#include "bindings/python_errors.h"
#include "communicator/records.h"
#include "core/errors.h"

namespace py = pybind11;

namespace ringcomm {
namespace {

// The first line is the cause; torch appends the place in its own code.
std::string first_line(const char* text) {
  const std::string all = text;
  return all.substr(0, all.find('\n'));
}

class C10dMessages final : public Messenger {
 public:
  explicit C10dMessages(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {
    try {
      backend_->setTimeout(kLongestTimeout);
    } catch (const std::exception&) {
      // Many backends cannot; where a wait takes a time-out, that is used.
    }
  }
  ~C10dMessages() override {
    without_gil([&] { backend_.reset(); });
  }

  int rank() const override { return backend_->getRank(); }
  int world_size() const override { return backend_->getSize(); }
  // MPI's library sends eagerly itself, and c10d ends the process with a request that is pending.
  bool announces_receives() const override { return backend_->getBackendName() == "gloo"; }

  MessagePtr isend(int peer, int tag, const std::byte* data, std::size_t num_bytes) override {
    return start(true, peer, tag, const_cast<std::byte*>(data), num_bytes);
  }
  MessagePtr irecv(int peer, int tag, std::byte* data, std::size_t num_bytes) override {
    return start(false, peer, tag, data, num_bytes);
  }

 private:
  // A Work of the backend, or its error message if it refused; both are empty if it was not asked.
  class Pending final : public Message {
   public:
    Pending(C10dMessages& owner, int peer, c10::intrusive_ptr<c10d::Work> work, std::string failure)
        : owner_(owner), peer_(peer), work_(std::move(work)), failure_(std::move(failure)) {
      const std::lock_guard lock(owner_.mutex_);
      owner_.pending_.insert(this);
    }
    // The work ends later, without the lock: Gloo's may wait for its thread.
    ~Pending() override {
      const std::lock_guard lock(owner_.mutex_);
      owner_.pending_.erase(this);
    }

    MessageEnd wait() override {
      if (owner_.is_aborted_) return MessageEnd::kAborted;
      if (work_ == nullptr) return MessageEnd::kFailed;
      try {
        // The group's watchdog has the real timeouts.
        if (work_->wait(kLongestTimeout)) {
          if (peer_ == kAnySource) peer_ = work_->sourceRank();
          return MessageEnd::kDone;
        }
        failure_ = "the message of the backend failed without an error";
      } catch (const std::exception& error) {
        failure_ = first_line(error.what());
      }
      return owner_.is_aborted_ ? MessageEnd::kAborted : MessageEnd::kFailed;
    }

    int source() const override { return peer_; }
    const std::string& failure() const override { return failure_; }
    const c10::intrusive_ptr<c10d::Work>& work() const { return work_; }

   private:
    C10dMessages& owner_;
    int peer_;
    const c10::intrusive_ptr<c10d::Work> work_;
    std::string failure_;
  };

  MessagePtr start(bool is_send, int peer, int tag, std::byte* data, std::size_t num_bytes) {
    c10::intrusive_ptr<c10d::Work> work;
    std::string failure;
    try {
      std::vector<at::Tensor> tensors{
          at::from_blob(data, {static_cast<std::int64_t>(num_bytes)}, at::kByte)};
      if (!is_aborted_)
        work = is_send              ? backend_->send(tensors, peer, tag)
               : peer == kAnySource ? backend_->recvAnysource(tensors, tag)
                                    : backend_->recv(tensors, peer, tag);
    } catch (const std::exception& error) {
      failure = first_line(error.what());
      if (peer == kAnySource && failure.find("does not support") != std::string::npos)
        throw Unsupported(failure);
    }
    return std::make_unique<Pending>(*this, peer, std::move(work), std::move(failure));
  }

  // Work::abort() ends a wait and no more: the works, and in them Gloo's buffers, live until their
  // last references go. Those of `works` go before this returns.
  void end_messages() noexcept override {
    is_aborted_ = true;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    {
      const std::lock_guard lock(mutex_);
      for (const Pending* pending : pending_)
        if (pending->work() != nullptr) works.push_back(pending->work());
    }
    for (const auto& work : works) try {
        work->abort();
      } catch (const std::exception&) {
        // Some backends end all works together, or none.
      }
    try {
      backend_->abort();
    } catch (const std::exception&) {
      // A work that cannot be ended ends with its connection.
    }
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::atomic<bool> is_aborted_ = false;
  std::mutex mutex_;
  std::set<const Pending*> pending_;  // all messages that live; with the mutex
};

}  // namespace

std::unique_ptr<Messenger> messages_over(c10::intrusive_ptr<c10d::Backend> backend) {
  return std::make_unique<C10dMessages>(std::move(backend));
}

c10::intrusive_ptr<c10d::Backend> make_message_backend(const std::string& name,
                                                       const c10::intrusive_ptr<c10d::Store>& store,
                                                       const std::string& key, int rank, int size,
                                                       const GroupOptions& options,
                                                       const LookForRanks& look,
                                                       const std::string& purpose) {
  const py::gil_scoped_acquire acquired;
  std::exception_ptr in_vain;
  const py::cpp_function goes_on([&](const std::vector<int>& missing) {
    try {
      const py::gil_scoped_release released;  // the store, which may be Python's, is asked
      look(missing);
    } catch (...) {
      in_vain = std::current_exception();
    }
    return in_vain == nullptr;
  });
  try {
    return py::module_::import("ringcomm.message_backend")
        .attr("make")(name, store, key, rank, size,
                      std::min(options.timeout, kLongestTimeout) + kBackendGrace,
                      options.group_name, options.global_ranks_in_group, goes_on)
        .cast<c10::intrusive_ptr<c10d::Backend>>();
  } catch (std::exception& error) {
    if (in_vain != nullptr) std::rethrow_exception(in_vain);
    auto* python = dynamic_cast<py::error_already_set*>(&error);
    if (python != nullptr && !python->matches(PyExc_Exception)) {  // KeyboardInterrupt
      python->restore();
      keep_interruption();
      throw Error({.kind = ErrorKind::kInterrupted, .rank = rank, .op = "init"},
                  "interrupted by a signal while the group was made");
    }
    throw Error({.kind = ErrorKind::kSystem, .rank = rank, .op = "init"},
                "ringcomm: the backend " + name + ", needed for " + purpose +
                    ", could not be created: " + error.what());
  }
}

c10::intrusive_ptr<c10d::Backend> make_device_backend(c10::Device device,
                                                      const c10::intrusive_ptr<c10d::Store>& store,
                                                      Communicator& communicator,
                                                      const GroupOptions& options) {
  const int size = communicator.world_size();
  const std::string purpose = "tensors on " + device.str();
  const WaitLimits limits{.timeout = std::min(options.timeout, kLongestTimeout),
                          .is_interrupted = is_interrupted};
  WaitGuard guard(limits);
  const LookForRanks look = [&](const std::vector<int>& missing) {
    const Activity activity{
        .op = "init", .description = "connecting " + purpose, .timeout = options.timeout};
    for (int rank = 0; rank < size; ++rank)
      if (communicator.group_state()->has_died(rank))
        communicator.failure().raise_stopped(WaitStatus::kPeerDied, rank, activity);
    if (const WaitStatus status = guard.check(); status != WaitStatus::kNone)
      communicator.failure().raise_stopped(status, missing.front(), activity);
  };
  std::string name, problem;
  {
    const py::gil_scoped_acquire acquired;
    try {
      name = py::module_::import("ringcomm.message_backend")
                 .attr("for_device")(options.engine.message_backend,
                                     c10::DeviceTypeName(device.type(), /*lower_case=*/true))
                 .cast<std::string>();
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_ValueError)) throw;
      problem = py::str(error.value()).cast<std::string>();
    }
  }
  // Those that have one would wait for the others.
  const auto names = RecordExchange(communicator, limits)
                         .all_gather(RecordText<64>(problem.empty() ? name : "no backend"));
  TORCH_CHECK_VALUE(problem.empty(), problem);
  for (int rank = 0; rank < size; ++rank) {
    const std::string other = names[static_cast<std::size_t>(rank)].str();
    TORCH_CHECK_VALUE(other == name, "ringcomm: ", purpose, " go by ", name,
                      " on this rank, but by ", other, " on rank ", rank);
  }
  return make_message_backend(name, store, communicator.group_state()->key(), communicator.rank(),
                              size, options, look, purpose);
}

}  // namespace ringcomm
