#pragma once

#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "transport/messages/message_transport.h"
#include "transport/process.h"

namespace ringcomm {

struct GroupOptions;

/// Messages by the send and recv of any backend of torch.distributed that moves CPU tensors: Gloo,
/// MPI, another package's. Messages with one tag must match in the order of their calls, and
/// Work::abort() (as Gloo's) or Backend::abort() (as most others') must end waits: time-outs are
/// not used, because Gloo's end all messages of a group.
class C10dMessages final : public MessageTransport {
 public:
  /// The backend is for these messages alone.
  explicit C10dMessages(c10::intrusive_ptr<c10d::Backend> backend);
  ~C10dMessages() override;

  int rank() const override { return backend_->getRank(); }
  int world_size() const override { return backend_->getSize(); }

  MessagePtr isend(int peer, int tag, const std::byte* data, std::size_t num_bytes) override;
  MessagePtr irecv(int peer, int tag, std::byte* data, std::size_t num_bytes) override;

 private:
  class Pending;

  template <class Start>
  MessagePtr start(int peer, const std::byte* data, std::size_t num_bytes, const Start& start);
  void end_messages() noexcept override;

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::atomic<bool> is_aborted_ = false;
  std::mutex mutex_;
  std::set<const Pending*> pending_;  // all messages that live; with the mutex
};

/// A new backend of torch.distributed for the messages of one group, created by
/// ringcomm.message_backend. `purpose` is for error messages. Collective over the group; takes the
/// GIL. Throws what `look` throws, and Error.
c10::intrusive_ptr<c10d::Backend> make_message_backend(
    const std::string& name, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    const GroupOptions& options, const LookForRanks& look, const std::string& purpose);

}  // namespace ringcomm
