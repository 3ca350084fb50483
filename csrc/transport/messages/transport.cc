#include "transport/transport.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "collectives/call.h"
#include "transport/messages/exchange.h"
#include "transport/shm/context.h"

namespace ringcomm {

HostsView::HostsView(const PeerTable& peer_table, int own_rank)
    : table(peer_table),
      rank(own_rank),
      host(table.host_of(rank)),
      local_rank(table.local_rank_of(rank)),
      local_ranks(table.ranks_on(host)) {
  for (int distance = 1; distance < num_hosts(); ++distance) {
    other_hosts.push_back((host + num_hosts() - distance) % num_hosts());
    const std::vector<int>& theirs = table.ranks_on(other_hosts.back());
    for (std::size_t first = 0; first < theirs.size(); first += local_ranks.size()) {
      rounds.emplace_back(local_ranks.size(), -1);
      std::copy_n(theirs.begin() + static_cast<std::ptrdiff_t>(first),
                  std::min(local_ranks.size(), theirs.size() - first), rounds.back().begin());
    }
  }
}

HostsView HostsView::flat(int world_size, int own_rank) {
  std::vector<RankRecord> records(static_cast<std::size_t>(world_size));
  for (RankRecord& record : records) record.host_id = std::to_string(&record - records.data());
  return {PeerTable(std::move(records)), own_rank};
}

int HostsView::rail_peer(int other_rank, int on_host) const {
  return of(table.ranks_on(on_host), table.local_rank_of(other_rank) % table.num_ranks_on(on_host));
}

std::vector<int> HostsView::representatives(int root) const {
  std::vector<int> ranks;
  for (int other = 0; other < num_hosts(); ++other) ranks.push_back(table.leader_of(other));
  if (root >= 0) of(ranks, table.host_of(root)) = root;
  return ranks;
}

namespace {

// A rank that fails reports it twice: in its host's shared memory, for the ranks of its host, and
// in the store. Every rank's watchdog reads the store and copies the report to its host's memory.
class MessageTransport final : public Transport {
 public:
  MessageTransport(KeyValueStore& store, host::Rendezvous& ranks, const PeerTable& peer_table,
                   const CommunicatorOptions& options, const MakeMessenger& make_messenger,
                   bool is_flat)
      : options_(options),
        flat_(HostsView::flat(ranks.world_size(), ranks.rank())),
        hosts_(is_flat ? flat_ : HostsView(peer_table, ranks.rank())),
        group_(store, ranks) {
    memory_.posted.resize(static_cast<std::size_t>(ranks.world_size()));
    try {
      if (hosts_.local_ranks.size() > 1) {
        local_ = std::make_unique<ShmTransport>(ranks, peer_table, ranks.rank(), options);
        local_->group_state().on_peer_event(
            [this](const PeerEvent& event, CallStep) { group_.record(event); });
      }
      // Before this rank leaves the memory of its host, where others may be in a call already.
      group_.on_abort([this] {
        if (local_ != nullptr) local_->group_state().abort(group_.abort_reason());
      });
      messenger_ = make_messenger(group_.key(), [&ranks](const std::vector<int>& missing) {
        ranks.look(missing, "did not connect to the others");
      });
    } catch (const std::exception& error) {
      // The other ranks may have made the group already, and wait for this rank.
      group_.abort(AbortReason::of(error, ranks.rank()));
      throw;
    }
    group_.watch(*messenger_);
  }

  ~MessageTransport() override {
    group_.leave();
    messenger_->abort();  // the receives that are posted ahead
  }

  GroupState& group_state() override { return group_; }
  bool shares_memory() const override { return false; }
  std::size_t mapped_bytes() const override {
    return local_ != nullptr ? local_->mapped_bytes() : 0;
  }
  std::unique_ptr<SendRecv> make_send_recv(Failure& failure, Stats& stats) override {
    return make_message_send_recv(*messenger_, group_, failure, stats);
  }

  void plan(Collective& call) const override {
    if (is_flat(call))
      plan_message_collective(hosts_.table.world_size(), options_, call);
    else
      call.algorithm = Algorithm::kHierarchical;
  }

  void return_idle_pages() override {
    if (local_ != nullptr) local_->return_idle_pages();
    memory_.staging.clear();
  }

  Traffic run(const Collective& call, const WaitLimits& limits) override {
    group_.record_call(call.seq);
    const CallHeader header = with_digest_of_shards(call, hosts_.table.world_size());
    MessageExchange exchange(*messenger_, group_, memory_, header, deadline_after(limits.timeout));
    try {
      return run_message_collective({hosts_, local_.get(), exchange, call, limits}, flat_);
    } catch (...) {
      // The store may not have it yet.
      if (local_ != nullptr && local_->group_state().is_aborted(false))
        group_.abort(local_->group_state().abort_reason());
      // Messages on their way would go on using the call's buffers, which end with it.
      messenger_->abort();
      throw;
    }
  }

 private:
  // Whether the hosts are ignored: left-to-right sums over the ranks cannot be computed host by
  // host, and an algorithm that the user names works on ranks.
  bool is_flat(const Collective& call) const {
    if (hosts_.is_flat()) return true;
    if (!is_reduction(call.op)) return false;
    if (options_.is_rank_ordered) return true;
    return call.op == OpKind::kAllReduce &&
           (call.algorithm != Algorithm::kAuto || options_.algorithm != Algorithm::kAuto);
  }

  CommunicatorOptions options_;
  HostsView flat_;
  HostsView hosts_;  // flat_ if all goes over messages
  MessageGroup group_;
  std::unique_ptr<Transport> local_;  // null where this rank is alone on its host
  std::unique_ptr<Messenger> messenger_;
  MessageMemory memory_;
};

}  // namespace

std::unique_ptr<Transport> make_message_transport(KeyValueStore& store, host::Rendezvous& ranks,
                                                  const PeerTable& peer_table,
                                                  const CommunicatorOptions& options,
                                                  const MakeMessenger& make_messenger,
                                                  bool is_flat) {
  return std::make_unique<MessageTransport>(store, ranks, peer_table, options, make_messenger,
                                            is_flat);
}

}  // namespace ringcomm
