#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace ringcomm::emulator {

/// Why a group moves no bytes any more; shared with what its streams still have to do.
class Breakage {
 public:
  /// The first reason stays.
  void set(const std::exception_ptr& reason);
  std::exception_ptr get() const;

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

/// Sends and receives of tensors of emulated GPUs, "emup2p": NCCL's as far as its users can tell.
///
/// Calls return at once. Messages run on the group's own stream of the device, which waits for what
/// the current stream was given before; Work::wait() makes the current stream wait. A send's stream
/// goes on when the receiver has the bytes, so that two ranks that both send first, outside of
/// startCoalescing() and endCoalescing(), wait for each other; messages between those two run
/// together. Between two ranks messages match in the order of the calls; tags mean nothing.
///
/// The bytes travel through the group's store. What does not arrive within the group's timeout, or
/// RINGCOMM_EMULATOR_P2P_TIMEOUT_MS (20,000) if that is less, breaks the group: works that are not
/// done fail, and so do new ones.
class EmulatedP2p final : public c10d::Backend {
 public:
  EmulatedP2p(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
              std::chrono::milliseconds timeout);

  const std::string getBackendName() const override { return "emup2p"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  void abort() override;
  void shutdown() override { abort(); }

 private:
  struct Batch {
    std::vector<Message> messages;
    std::vector<at::Tensor> tensors;
    std::vector<at::Tensor> received;
  };

  c10::intrusive_ptr<c10d::Work> add(bool is_send, std::vector<at::Tensor>& tensors, int peer);
  /// Null where there is nothing to do.
  c10::intrusive_ptr<c10d::Work> submit(Batch batch, c10d::OpType op_type);
  c10::Stream stream_on(c10::DeviceIndex device);

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<Breakage> breakage_ = std::make_shared<Breakage>();
  std::map<std::pair<bool, int>, std::uint64_t> num_messages_;  // by direction and peer
  std::map<c10::DeviceIndex, c10::Stream> streams_;
  std::optional<Batch> coalesced_;  // while calls are
};

}  // namespace ringcomm::emulator
