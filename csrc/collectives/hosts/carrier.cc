#include "collectives/hosts/carrier.h"

#include <array>
#include <memory>
#include <span>
#include <string>

#include "collectives/messages/collectives.h"
#include "collectives/messages/members.h"
#include "collectives/messages/p2p.h"
#include "collectives/shm/carrier.h"
#include "transport/messages/message_transport.h"

namespace ringcomm {
namespace {

std::unique_ptr<Carrier> make_local(shm::Rendezvous& ranks, const PeerTable& peer_table,
                                    const CommunicatorOptions& options) {
  if (peer_table.num_ranks_on(peer_table.host_of(ranks.rank())) == 1) return nullptr;
  return std::make_unique<ShmCarrier>(ranks, peer_table, ranks.rank(), options);
}

// A rank that fails reports it twice: in its host's shared memory, for the ranks of its host, and
// in the store. Every rank's watchdog reads the store and copies the report to its host's memory.
class HostsCarrier final : public Carrier {
 public:
  HostsCarrier(KeyValueStore& store, shm::Rendezvous& ranks, const PeerTable& peer_table,
               const CommunicatorOptions& options, const MakeMessages& make_messages, bool is_flat)
      : options_(options),
        peer_table_(peer_table),
        is_flat_(is_flat),
        members_(store, ranks),
        local_(members_.told_if_it_fails([&]() -> std::unique_ptr<Carrier> {
          return is_flat ? nullptr : make_local(ranks, peer_table, options);
        })),
        transport_(members_.told_if_it_fails([&] {
          // Before this rank leaves the memory of its host, where others may be in a call already.
          members_.on_abort([this] { tell_host(); });
          return make_messages([&ranks](int missing) {
            ranks.look(missing,
                       "rank " + std::to_string(missing) + " did not connect to the others");
          });
        })),
        messages_(*transport_, {.is_rank_ordered = options.is_rank_ordered}) {
    members_.watch(*transport_);
  }

  ~HostsCarrier() override { members_.leave(); }
  HostsCarrier(const HostsCarrier&) = delete;
  HostsCarrier& operator=(const HostsCarrier&) = delete;

  Membership& membership() override { return members_; }
  bool runs_in_caller() const override { return false; }
  std::size_t mapped_bytes() const override {
    return local_ != nullptr ? local_->mapped_bytes() : 0;
  }
  std::unique_ptr<PointToPoint> make_p2p(Failure& failure, Stats& stats) override {
    return make_message_p2p(*transport_, members_, failure, stats);
  }

  void plan(const Collective& call, CallHeader& header) const override {
    if (is_flat(call))
      plan_message_collective(peer_table_.world_size(), call, options_, header);
    else
      header.algorithm = Algorithm::kHierarchical;
  }

  Traffic run(const Collective& call, const CallHeader& header, const WaitLimits& limits) override {
    members_.note_call(header.seq);
    MessageMembers::Operation operation(members_, deadline_after(limits.timeout));
    messages_.begin(operation);
    try {
      Traffic traffic{.algorithm = header.algorithm};
      if (is_flat_)
        traffic.sent_bytes = run_message_collective(messages_, call, header);
      else
        traffic = run_by_hosts({.peer_table = peer_table_,
                                .local = local_.get(),
                                .messages = messages_,
                                .options = options_},
                               call, header, limits);
      messages_.finish();
      return traffic;
    } catch (...) {
      // The store may not have it yet.
      if (local_ != nullptr && local_->membership().is_given_up(false))
        members_.abort(local_->membership().abort_reason());
      // Messages on their way would go on using the call's buffers, which end with it.
      transport_->abort();
      messages_.drop();
      throw;
    }
  }

 private:
  void tell_host() {
    if (local_ != nullptr) local_->membership().abort(members_.abort_reason());
  }

  // Whether the hosts are ignored: left-to-right sums over the ranks cannot be computed host by
  // host, and an algorithm that the user names works on ranks.
  bool is_flat(const Collective& call) const {
    if (is_flat_) return true;
    if (!is_reduction(call.op)) return false;
    if (options_.is_rank_ordered) return true;
    return call.op == OpKind::kAllReduce &&
           (call.algorithm != Algorithm::kAuto || options_.algorithm != Algorithm::kAuto);
  }

  CommunicatorOptions options_;
  PeerTable peer_table_;
  bool is_flat_;
  MessageMembers members_;
  std::unique_ptr<Carrier> local_;  // null on a host with one rank, and if all goes over messages
  std::unique_ptr<MessageTransport> transport_;
  MessageEngine messages_;
};

}  // namespace

std::unique_ptr<Carrier> make_hosts_carrier(KeyValueStore& store, shm::Rendezvous& ranks,
                                            const PeerTable& peer_table,
                                            const CommunicatorOptions& options,
                                            const MakeMessages& make_messages, bool is_flat) {
  return std::make_unique<HostsCarrier>(store, ranks, peer_table, options, make_messages, is_flat);
}

}  // namespace ringcomm
