#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "bindings/group_options.h"
#include "transport/messages/message_transport.h"
#include "transport/wait_limits.h"

namespace ringcomm {

/// Messages by the send and recv of any backend of torch.distributed that moves CPU tensors: Gloo,
/// MPI, another package's.
///
/// What is asked of the backend: a send and a recv with the same tag match in the order of their
/// calls; recvAnysource only where users receive from any source. Its time-outs are not used:
/// Gloo's, for one, end all of a group's messages and not the one that was late. To end waits it
/// must implement Work::abort() (as Gloo does) or Backend::abort() (as most others do).
class C10dMessages final : public MessageTransport {
 public:
  /// The backend is for these messages alone.
  explicit C10dMessages(c10::intrusive_ptr<c10d::Backend> backend);
  ~C10dMessages() override;

  int rank() const override { return backend_->getRank(); }
  int world_size() const override { return backend_->getSize(); }
  const std::string& name() const override { return name_; }

  MessagePtr isend(int peer, int tag, const std::byte* data, std::size_t num_bytes) override;
  MessagePtr irecv(int peer, int tag, std::byte* data, std::size_t num_bytes) override;

 private:
  class Pending;

  void end_messages() noexcept override;
  bool is_aborted();

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::string name_;
  std::mutex mutex_;  // guards the rest
  bool is_aborted_ = false;
  std::list<c10::intrusive_ptr<c10d::Work>> works_;  // of all messages that live
};

/// A new backend of torch.distributed, made by ringcomm.message_backend for messages of a group
/// alone. `purpose` says which, for errors. Collective over the group; takes the GIL. Throws what
/// `look` does, and Error.
c10::intrusive_ptr<c10d::Backend> make_message_backend(
    const std::string& name, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    const GroupOptions& options, const LookForRanks& look, const std::string& purpose);

}  // namespace ringcomm
