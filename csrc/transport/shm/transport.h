#pragma once

#include "host/group.h"
#include "host/rendezvous.h"
#include "host/wait_scope.h"
#include "transport/shm/context.h"
#include "transport/transport.h"

namespace ringcomm {

/// Collectives of ranks that share memory: on boards, on the links of a ring, or on buffers that
/// all ranks can access directly (SharedArena).
class ShmTransport final : public Transport {
 public:
  /// Collective over the ranks on the host of `rank`, which have been found. Throws Error.
  ShmTransport(host::Rendezvous& rendezvous, const PeerTable& peer_table, int rank,
               const CommunicatorOptions& options);

  Membership& membership() override { return group_; }
  std::unique_ptr<SendRecv> make_send_recv(Failure& failure,
                                           Stats& stats) override;  // send_recv.cc
  bool shares_memory() const override { return true; }
  void plan(const Collective& call, CallHeader& header) const override;
  Traffic run(const Collective& call, const CallHeader& header, const WaitLimits& limits) override;
  void return_idle_pages() override { group_.return_idle_pages(); }
  std::size_t mapped_bytes() const override { return group_.num_bytes(); }

 private:
  BufferHandle handle_of(const Collective& call) const;
  Traffic run_or_share(const Collective& call, const CallHeader& header);

  CommunicatorOptions options_;
  host::Group group_;
  host::WaitScope scope_;
  ShmContext context_;
};

}  // namespace ringcomm
