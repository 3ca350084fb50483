#include "collectives/hosts/rooted.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "collectives/collective.h"
#include "collectives/hosts/agreement.h"
#include "collectives/messages/collectives.h"
#include "collectives/messages/exchange.h"
#include "core/chunk_layout.h"

namespace ringcomm {
namespace {

// The maximum of another rank's buffer that a rank stages at a time.
constexpr std::size_t kStagingBytes = std::size_t{4} << 20;

// One rank of each host, by host: the root of its own, else the leader.
std::vector<int> representatives(const HostsEngine& engine, int root) {
  std::vector<int> ranks;
  for (int host = 0; host < engine.peer_table().num_hosts(); ++host)
    ranks.push_back(
        host == engine.peer_table().host_of(root) ? root : engine.peer_table().leader_of(host));
  return ranks;
}

// A collective with shares as this host's ranks see it: the others' shares left out.
class LocalShares {
 public:
  LocalShares(const HostsEngine& engine, const Collective& call) : call_(call) {
    const bool is_root = engine.rank() == call.root;
    const bool has_inputs =
        call.op == OpKind::kAllToAll || (call.op == OpKind::kScatter && is_root);
    const bool has_outputs =
        call.op == OpKind::kAllToAll || (call.op == OpKind::kGather && is_root);
    for (const int rank : engine.local_ranks()) {
      if (has_inputs) {
        inputs_.push_back(call.inputs[rank]);
        input_elems_.push_back(call.input_share(rank));
      }
      if (has_outputs) {
        outputs_.push_back(call.outputs[rank]);
        output_elems_.push_back(call.output_share(rank));
      }
    }
    if (call.root >= 0) call_.root = engine.peer_table().local_rank_of(call.root);
    if (has_inputs) {
      call_.inputs = inputs_.data();
      call_.input_elems = input_elems_.data();
    }
    if (has_outputs) {
      call_.outputs = outputs_.data();
      call_.output_elems = output_elems_.data();
    }
  }
  LocalShares(const LocalShares&) = delete;
  LocalShares& operator=(const LocalShares&) = delete;

  const Collective& call() const { return call_; }

 private:
  Collective call_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
  std::vector<std::size_t> input_elems_, output_elems_;
};

template <class Body>
void for_each_on_other_hosts(const HostsEngine& engine, const Body& body) {
  for (int distance = 1; distance < engine.world_size(); ++distance) {
    const int rank = (engine.rank() + distance) % engine.world_size();
    if (!engine.is_local(rank)) body(rank);
  }
}

// This host's sum of `piece`, in `to` of the local rank `root`.
void reduce_inside(HostsEngine& engine, const Collective& call, const ElemRange& piece, int root,
                   void* to) {
  const std::size_t bytes = element_bytes(call.dtype);
  const void* inputs[] = {at(call.inputs[0], piece.begin_elems, bytes)};
  void* outputs[] = {to};
  engine.run_local({.op = OpKind::kReduce,
                    .dtype = call.dtype,
                    .reduction = undivided(call.reduction),
                    .root = root,
                    .num_elems = piece.num_elems,
                    .inputs = inputs,
                    .outputs = outputs});
}

void broadcast_inside(HostsEngine& engine, const Collective& call, int root, const void* from) {
  const void* inputs[] = {from};
  engine.run_local({.op = OpKind::kBroadcast,
                    .dtype = call.dtype,
                    .element_name = call.element_name,
                    .root = root,
                    .num_elems = call.num_elems,
                    .inputs = inputs,
                    .outputs = call.outputs});
}

}  // namespace

void hosts_leader_all_reduce(HostsEngine& engine, const Collective& call,
                             const CallHeader& header) {
  const ReduceOp& op = reduce_op_of(call);
  const ElemRange all{0, call.num_elems};
  const std::size_t num_bytes = call.num_bytes();
  const int num_hosts = engine.peer_table().num_hosts();
  if (!engine.is_leader()) {
    reduce_inside(engine, call, all, 0, call.outputs[0]);
    broadcast_inside(engine, call, 0, call.outputs[0]);
    return;
  }
  std::vector<std::byte*> sums;
  for (int host = 0; host < num_hosts; ++host) sums.push_back(engine.stage(num_bytes));
  std::byte* own = sums[static_cast<std::size_t>(engine.host())];
  reduce_inside(engine, call, all, 0, own);
  MessageExchange exchange(engine.leaders(), header);
  for (int distance = 1; distance < num_hosts; ++distance) {
    const int host = (engine.host() + distance) % num_hosts;
    exchange.recv(host, sums[static_cast<std::size_t>(host)], num_bytes);
    exchange.send(host, own, num_bytes);
    engine.count_sent(num_bytes);
  }
  engine.in_numbers_of(representatives(engine, engine.rank()), [&] { exchange.finish(); });
  const std::vector<const void*> sources(sums.begin(), sums.end());
  if (call.num_elems > 0)
    op.combine(call.outputs[0], nullptr, sources.data(), num_hosts, call.num_elems,
               divisor_of(call, engine.world_size()));
  broadcast_inside(engine, call, 0, call.outputs[0]);
}

void hosts_broadcast(HostsEngine& engine, const Collective& call, const CallHeader& header,
                     const CommunicatorOptions& options) {
  hosts_barrier(engine, header);
  const std::vector<int> ranks = representatives(engine, call.root);
  const int representative = ranks[static_cast<std::size_t>(engine.host())];
  if (engine.rank() == representative) {
    MessageEngine& messages = engine.among(ranks);
    Collective between = call;
    between.root = engine.peer_table().host_of(call.root);
    CallHeader header_between = header;
    header_between.root = between.root;
    plan_message_collective(messages.world_size(), between, options, header_between);
    engine.in_numbers_of(ranks, [&] {
      engine.count_sent(run_message_collective(messages, between, header_between));
    });
  }
  broadcast_inside(engine, call, engine.peer_table().local_rank_of(representative),
                   engine.rank() == call.root ? call.inputs[0] : call.outputs[0]);
}

void hosts_reduce(HostsEngine& engine, const Collective& call, const CallHeader& header) {
  hosts_barrier(engine, header);
  const ReduceOp& op = reduce_op_of(call);
  const std::vector<int> ranks = representatives(engine, call.root);
  const int representative = ranks[static_cast<std::size_t>(engine.host())];
  const int local_root = engine.peer_table().local_rank_of(representative);
  const std::size_t max_elems =
      std::min(std::max<std::size_t>(1, call.num_elems), kStagingBytes / op.element_bytes);
  std::vector<std::byte*> sums(ranks.size());
  for (std::size_t host = 0; host < ranks.size(); ++host)
    if (engine.rank() == call.root || ranks[host] == engine.rank())
      sums[host] = engine.stage(max_elems * op.element_bytes);
  std::byte* own = sums[static_cast<std::size_t>(engine.host())];
  MessageExchange exchange(engine.all(), header);
  for (std::size_t idx = 0; idx < num_slices(call.num_elems, max_elems); ++idx) {
    const ElemRange piece = slice_of({0, call.num_elems}, idx, max_elems);
    const std::size_t num_bytes = piece.num_elems * op.element_bytes;
    const bool is_root = engine.rank() == call.root;
    if (is_root)
      for (std::size_t host = 0; host < ranks.size(); ++host)
        if (ranks[host] != call.root) exchange.recv(ranks[host], sums[host], num_bytes);
    reduce_inside(engine, call, piece, local_root, own);
    if (!is_root && engine.rank() == representative) {
      exchange.send(call.root, own, num_bytes);
      engine.count_sent(num_bytes);
    }
    exchange.finish();
    if (!is_root) continue;
    const std::vector<const void*> sources(sums.begin(), sums.end());
    op.combine(at(call.outputs[0], piece.begin_elems, op.element_bytes), nullptr, sources.data(),
               static_cast<int>(sources.size()), piece.num_elems,
               divisor_of(call, engine.world_size()));
  }
}

void hosts_gather(HostsEngine& engine, const Collective& call, const CallHeader& header) {
  hosts_barrier(engine, header);
  const std::size_t bytes = element_bytes(call.dtype);
  MessageExchange exchange(engine.all(), header);
  if (engine.rank() == call.root) {
    for_each_on_other_hosts(engine, [&](int rank) {
      exchange.recv(rank, call.outputs[rank], call.output_share(rank) * bytes);
    });
  } else if (!engine.is_local(call.root)) {
    exchange.send(call.root, call.inputs[0], call.num_bytes());
    engine.count_sent(call.num_bytes());
  }
  if (engine.is_local(call.root)) engine.run_local(LocalShares(engine, call).call());
  exchange.finish();
}

void hosts_scatter(HostsEngine& engine, const Collective& call, const CallHeader& header) {
  hosts_barrier(engine, header);
  const std::size_t bytes = element_bytes(call.dtype);
  MessageExchange exchange(engine.all(), header);
  if (engine.rank() == call.root) {
    for_each_on_other_hosts(engine, [&](int rank) {
      exchange.send(rank, call.inputs[rank], call.input_share(rank) * bytes);
      engine.count_sent(call.input_share(rank) * bytes);
    });
  } else if (!engine.is_local(call.root)) {
    exchange.recv(call.root, call.outputs[0], call.num_bytes());
  }
  if (engine.is_local(call.root)) engine.run_local(LocalShares(engine, call).call());
  exchange.finish();
}

void hosts_all_to_all(HostsEngine& engine, const Collective& call, const CallHeader& header) {
  HostsGreeting greeting(engine, header);
  MessageExchange exchange(engine.all(), header);
  for_each_on_other_hosts(engine,
                          [&](int rank) { engine.count_sent(exchange.swap_shares(call, rank)); });
  engine.run_local(LocalShares(engine, call).call());
  greeting.finish();
  exchange.finish();
}

void hosts_barrier(HostsEngine& engine, const CallHeader& header) {
  if (engine.is_leader())
    engine.in_numbers_of(representatives(engine, engine.rank()), [&] {
      run_message_collective(engine.leaders(), {.op = OpKind::kBarrier}, header);
    });
  engine.run_local({.op = OpKind::kBarrier});
}

}  // namespace ringcomm
