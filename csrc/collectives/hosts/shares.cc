#include "collectives/hosts/shares.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "collectives/collective.h"
#include "collectives/messages/exchange.h"
#include "core/chunk_layout.h"

namespace ringcomm {
namespace {

// The maximum of other ranks' chunks that a rank stages at a time; larger chunks are reduced in
// pieces. It takes some milliseconds on a fast network, so the latency of a message is small next
// to it.
constexpr std::size_t kStagingBytes = std::size_t{8} << 20;

// Which rank transfers which chunk between this host and the others.
class Couriers {
 public:
  explicit Couriers(const HostsEngine& engine)
      : peer_table_(engine.peer_table()), local_size_(engine.local_size()) {}

  /// The number of turns in which this host's ranks serve those of `host`.
  int num_turns(int host) const {
    return (peer_table_.num_ranks_on(host) + local_size_ - 1) / local_size_;
  }
  /// The rank of `host` that `local` serves in a turn, or -1.
  int served(int host, int turn, int local) const {
    const int place = turn * local_size_ + local;
    return place < peer_table_.num_ranks_on(host)
               ? peer_table_.ranks_on(host)[static_cast<std::size_t>(place)]
               : -1;
  }
  /// The rank on `host` that serves `rank`.
  int courier_of(int rank, int host) const {
    return peer_table_.ranks_on(host)[static_cast<std::size_t>(peer_table_.local_rank_of(rank) %
                                                               peer_table_.num_ranks_on(host))];
  }

 private:
  const PeerTable& peer_table_;
  int local_size_;
};

template <class Body>
void for_each_other_host(const HostsEngine& engine, const Body& body) {
  const int num_hosts = engine.peer_table().num_hosts();
  for (int distance = 1; distance < num_hosts; ++distance)
    body((engine.host() + distance) % num_hosts);
}

class ReduceScatter {
 public:
  ReduceScatter(HostsEngine& engine, const CallHeader& header, const MessageShares& shares)
      : engine_(engine),
        header_(header),
        shares_(shares),
        couriers_(engine),
        exchange_(engine.all(), header),
        piece_elems_(std::clamp<std::size_t>(
            kStagingBytes / (static_cast<std::size_t>(engine.world_size()) * shares.element_bytes),
            1, std::max<std::size_t>(1, shares.max_elems()))) {
    const std::size_t piece_bytes = piece_elems_ * shares.element_bytes;
    for (int host = 0; host < engine.peer_table().num_hosts(); ++host) {
      received_.push_back(host == engine.host() ? nullptr : engine.stage(piece_bytes));
      partials_.emplace_back();
      for (int turn = 0; turn < couriers_.num_turns(host); ++turn)
        partials_.back().push_back(engine.stage(host == engine.host() ? 0 : piece_bytes));
    }
  }

  void run(HostsGreeting& greeting) {
    const std::size_t num_pieces =
        std::max<std::size_t>(1, num_slices(shares_.max_elems(), piece_elems_));
    for (std::size_t idx = 0; idx < num_pieces; ++idx) {
      const ElemRange own = slice(engine_.rank(), idx);
      for_each_other_host(engine_, [&](int host) {
        exchange_.recv(couriers_.courier_of(engine_.rank(), host), received(host),
                       own.num_elems * shares_.element_bytes);
        for (int turn = 0; turn < couriers_.num_turns(host); ++turn) send_to(host, turn, idx);
      });
      reduce_inside(engine_.host(), 0, idx, shares_.output(engine_.rank(), own));
      greeting.finish();
      exchange_.finish();
      combine(own);
    }
  }

 private:
  ElemRange slice(int rank, std::size_t idx) const {
    return shares_.slice(rank, idx, piece_elems_);
  }
  std::byte* received(int host) const { return received_[static_cast<std::size_t>(host)]; }

  void send_to(int host, int turn, std::size_t idx) {
    std::byte* partial = partials_[static_cast<std::size_t>(host)][static_cast<std::size_t>(turn)];
    reduce_inside(host, turn, idx, partial);
    const int rank = couriers_.served(host, turn, engine_.local_rank());
    if (rank < 0) return;
    const std::size_t num_bytes = slice(rank, idx).num_elems * shares_.element_bytes;
    exchange_.send(rank, partial, num_bytes);
    engine_.count_sent(num_bytes);
  }

  // Reduces this host's data for the ranks that it serves in a turn; each rank gets the chunk of
  // the rank that it serves.
  void reduce_inside(int host, int turn, std::size_t idx, std::byte* to) {
    std::vector<const void*> inputs;
    std::vector<std::size_t> elems;
    for (int local = 0; local < engine_.local_size(); ++local) {
      const int rank = couriers_.served(host, turn, local);
      const ElemRange part = rank < 0 ? ElemRange{} : slice(rank, idx);
      inputs.push_back(rank < 0 ? nullptr : shares_.input(rank, part));
      elems.push_back(part.num_elems);
    }
    if (std::all_of(elems.begin(), elems.end(), [](std::size_t n) { return n == 0; })) return;
    void* outputs[] = {to};
    engine_.run_local({.op = OpKind::kReduceScatter,
                       .dtype = header_.dtype,
                       .reduction = undivided(header_.reduction),
                       .num_elems = elems[static_cast<std::size_t>(engine_.local_rank())],
                       .inputs = inputs.data(),
                       .outputs = outputs,
                       .input_elems = elems.data()});
  }

  void combine(const ElemRange& own) const {
    if (own.num_elems == 0) return;
    std::byte* output = shares_.output(engine_.rank(), own);
    std::vector<const void*> sources;
    for (int host = 0; host < engine_.peer_table().num_hosts(); ++host)
      sources.push_back(host == engine_.host() ? output : received(host));
    shares_.op->combine(output, nullptr, sources.data(), static_cast<int>(sources.size()),
                        own.num_elems, shares_.divisor);
  }

  HostsEngine& engine_;
  const CallHeader& header_;
  const MessageShares& shares_;
  Couriers couriers_;
  MessageExchange exchange_;
  std::size_t piece_elems_;
  std::vector<std::byte*> received_;               // by host
  std::vector<std::vector<std::byte*>> partials_;  // by host and turn
};

}  // namespace

void hosts_reduce_scatter(HostsEngine& engine, const CallHeader& header,
                          const MessageShares& shares, HostsGreeting& greeting) {
  ReduceScatter(engine, header, shares).run(greeting);
}

void hosts_all_gather(HostsEngine& engine, const CallHeader& header, const MessageShares& shares,
                      HostsGreeting& greeting) {
  const Couriers couriers(engine);
  MessageExchange exchange(engine.all(), header);
  for_each_other_host(engine, [&](int host) {
    const std::size_t own_bytes = shares.num_bytes(engine.rank());
    exchange.send(couriers.courier_of(engine.rank(), host), shares.of(engine.rank()).output,
                  own_bytes);
    engine.count_sent(own_bytes);
    for (int turn = 0; turn < couriers.num_turns(host); ++turn) {
      const int rank = couriers.served(host, turn, engine.local_rank());
      if (rank >= 0) exchange.recv(rank, shares.of(rank).output, shares.num_bytes(rank));
    }
  });
  const auto share_inside = [&](int host) {
    for (int turn = 0; turn < couriers.num_turns(host); ++turn) {
      std::vector<void*> outputs;
      std::vector<std::size_t> elems;
      for (int local = 0; local < engine.local_size(); ++local) {
        const int rank = couriers.served(host, turn, local);
        outputs.push_back(rank < 0 ? nullptr : shares.of(rank).output);
        elems.push_back(rank < 0 ? 0 : shares.of(rank).num_elems);
      }
      const auto own = static_cast<std::size_t>(engine.local_rank());
      const void* inputs[] = {outputs[own]};
      engine.run_local({.op = OpKind::kAllGather,
                        .dtype = header.dtype,
                        .num_elems = elems[own],
                        .inputs = inputs,
                        .outputs = outputs.data(),
                        .output_elems = elems.data()});
    }
  };
  share_inside(engine.host());  // while the messages are on their way
  greeting.finish();
  exchange.finish();
  for_each_other_host(engine, share_inside);
}

}  // namespace ringcomm
