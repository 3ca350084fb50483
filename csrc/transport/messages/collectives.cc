#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "collectives/call.h"
#include "collectives/trace.h"
#include "core/chunk_layout.h"
#include "transport/messages/exchange.h"

namespace ringcomm {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// The limits are from measurements (docs/decisions.md, between hosts).

// From this size of the whole call, bandwidth costs more than latency, so every link should be busy
// with its part. In a broadcast or all_gather between two ranks either form is the same message.
constexpr std::size_t kRingMinBytes = kMiB;

// One message step in which every rank, or every host's leader, has all data beats two in which
// each has its part. It sends N/2 times the bytes, and with two none more.
std::size_t one_step_max_bytes(int num_ranks) {
  return num_ranks == 2 ? kMiB : kMiB / 2 / static_cast<std::size_t>(num_ranks);
}

// From this size, a shard is received before the next one is sent to another rank: many connections
// at a time lose packets on a shared cable.
constexpr std::size_t kSteppedBytes = kMiB / 4;

// The bytes of the whole call; the same on every rank.
std::size_t total_bytes(const Collective& call, int world_size) {
  std::size_t elems = call.num_elems;
  const bool is_gathered = call.op == OpKind::kAllGather;
  if (is_gathered || call.op == OpKind::kReduceScatter) {
    elems = 0;
    for (int rank = 0; rank < world_size; ++rank)
      elems += is_gathered ? call.output_shard(rank) : call.input_shard(rank);
  }
  return elems * element_bytes(call.dtype);
}

// The last part of a broadcast, and of an all_reduce through the leaders.
void broadcast_inside(HostsCall& c, int local_root, const void* from) {
  const void* inputs[] = {from};
  c.run_local({{.num_elems = c.call.num_elems,
                .root = local_root,
                .op = OpKind::kBroadcast,
                .dtype = c.call.dtype,
                .element_name = c.call.element_name},
               inputs,
               c.call.outputs});
}

// The leaders exchange headers by dissemination, and each compares the other's: in step s with the
// host 2^s before it. A rank that returns knows that all ranks have arrived at this call.
void barrier_hosts(HostsCall& c) {
  c.run_local({{.op = OpKind::kBarrier}});
  int num_steps = 0;
  while (1 << num_steps < c.num_hosts()) ++num_steps;
  for (int step = 0; c.hosts.local_rank == 0 && step < num_steps; ++step) {
    const int distance = 1 << step;
    c.exchange.step() = {step + 1, num_steps, 1, 1};
    c.recv(c.leader_at(c.num_hosts() - distance), nullptr, 0);
    c.send(c.leader_at(distance), nullptr, 0);
    c.exchange.finish();
  }
  c.run_local({{.op = OpKind::kBarrier}});
}

// To the root, or in a short all_reduce to all leaders: one rank of each host has its sum, and
// sends it to those that add them up in the order of the hosts.
void reduce_hosts(HostsCall& c) {
  const std::vector<int> ranks = c.hosts.representatives(c.call.root);
  const int representative = of(ranks, c.hosts.host);
  const bool receives = c.rank == (c.call.root < 0 ? representative : c.call.root);
  const std::size_t max_elems =
      std::clamp<std::size_t>(kStagingBytes / ranks.size() / c.element_bytes, 1,
                              std::max<std::size_t>(1, c.call.num_elems));
  std::vector<std::byte*> sums(ranks.size());  // by host
  for (int host = 0; host < c.num_hosts(); ++host)
    if (host != c.hosts.host ? receives : c.local != nullptr && c.rank == representative)
      of(sums, host) = c.exchange.stage(c.bytes(max_elems));
  if (c.call.root >= 0) c.compare_hosts(c.call.root == c.leader_at(1), receives);
  // One piece at least, because headers are exchanged even without data.
  const std::size_t num_pieces = std::max<std::size_t>(1, num_slices(c.call.num_elems, max_elems));
  for (std::size_t idx = 0; idx < num_pieces; ++idx) {
    const ElemRange piece = slice_of({0, c.call.num_elems}, idx, max_elems);
    c.exchange.step() = {1, 1, idx + 1, num_pieces};
    const void* input = at(c.call.inputs[0], piece.begin_elems, c.element_bytes);
    if (c.local != nullptr) {
      void* output = of(sums, c.hosts.host);
      c.run_local({{.num_elems = piece.num_elems,
                    .root = c.hosts.table.local_rank_of(representative),
                    .op = OpKind::kReduce,
                    .dtype = c.call.dtype,
                    .reduction = undivided(c.call.reduction)},
                   &input,
                   &output});
      input = output;
    }
    for (const int host : c.hosts.other_hosts) {
      if (c.rank != representative) break;
      const int peer = of(ranks, host);
      if (receives) c.recv(peer, of(sums, host), piece.num_elems);
      if (c.call.root < 0 || peer == c.call.root) c.send(peer, input, piece.num_elems);
    }
    c.exchange.finish();
    c.exchange.finish_sends();  // the result may be in place
    if (!receives || piece.num_elems == 0) continue;
    std::vector<const void*> sources(sums.begin(), sums.end());
    of(sources, c.hosts.host) = input;
    reduce_op_of(c.call).combine(at(c.call.outputs[0], piece.begin_elems, c.element_bytes), nullptr,
                                 sources.data(), c.num_hosts(), piece.num_elems,
                                 divisor_of(c.call, c.world_size));
  }
}

// A large broadcast or reduce in slices along the representatives: from the root to the one before
// it, or from the one after the root to the root. In a reduce each rank adds its part, with one
// rounding per hop.
void chain_hosts(HostsCall& c, const std::vector<int>& ranks) {
  const int previous = of(ranks, (c.hosts.host + c.num_hosts() - 1) % c.num_hosts());
  const int next = of(ranks, (c.hosts.host + 1) % c.num_hosts());
  const bool reduces = c.call.op == OpKind::kReduce;
  const bool is_first = reduces ? previous == c.call.root : c.rank == c.call.root;
  const bool is_last = (reduces ? c.rank : next) == c.call.root;
  const std::size_t max_elems = kSliceBytes / c.element_bytes;
  const bool adds = reduces && !is_first;
  std::byte* const slots = adds ? c.exchange.stage(kNumSlots * kSliceBytes) : nullptr;
  const auto at_slice = [&](const void* buffer, std::size_t idx) {
    return const_cast<std::byte*>(at(buffer, idx * max_elems, c.element_bytes));
  };
  const auto data_of = [&](std::size_t idx) {
    return adds ? slots + idx % kNumSlots * kSliceBytes
                : at_slice(is_first ? c.call.inputs[0] : c.call.outputs[0], idx);
  };
  const auto num_elems = [&](std::size_t idx) {
    return slice_of({0, c.call.num_elems}, idx, max_elems).num_elems;
  };
  const auto post = [&](std::size_t idx) {
    if (!is_first) c.recv(previous, data_of(idx), num_elems(idx));
  };
  const auto complete = [&](std::size_t idx) {
    c.exchange.finish();
    c.exchange.finish_sends();  // of the slice before the last one
    const void* const sources[] = {data_of(idx), at_slice(c.call.inputs[0], idx)};
    if (adds)
      reduce_op_of(c.call).combine(is_last ? at_slice(c.call.outputs[0], idx) : data_of(idx),
                                   nullptr, sources, 2, num_elems(idx),
                                   is_last ? divisor_of(c.call, c.world_size) : 1);
    if (!is_last) c.send(next, data_of(idx), num_elems(idx));
  };
  c.in_pieces(1, 1, num_slices(c.call.num_elems, max_elems), post, complete);
}

// From the root to one rank of each host, and inside the hosts.
void broadcast_hosts(HostsCall& c) {
  const std::vector<int> ranks = c.hosts.representatives(c.call.root);
  const int representative = of(ranks, c.hosts.host);
  const bool is_root = c.rank == c.call.root;
  const bool is_long = c.call.num_bytes() >= kRingMinBytes && c.num_hosts() > 2;
  const auto inside = [&] {
    broadcast_inside(c, c.hosts.table.local_rank_of(representative),
                     is_root ? c.call.inputs[0] : c.call.outputs[0]);
  };
  // In a chain others forward data when they have it, and their header must not wait for that.
  c.compare_hosts(is_root, c.previous_leader() == c.call.root);
  if (!is_long && is_root)
    for (const int host : c.hosts.other_hosts)
      c.send(of(ranks, host), c.call.inputs[0], c.call.num_elems);
  else if (!is_long && c.rank == representative)
    c.recv(c.call.root, c.call.outputs[0], c.call.num_elems);
  const bool begins_inside = !is_long && representative == c.call.root;
  begins_inside ? inside() : c.run_local({{.op = OpKind::kBarrier}});
  if (is_long && c.rank == representative) chain_hosts(c, ranks);
  c.exchange.finish();
  if (!begins_inside) inside();
}

// The call as this host's ranks see it: the others' shards left out.
void move_inside(HostsCall& c) {
  if (c.local == nullptr) {
    const auto given = part_given(c.call, c.rank, c.rank);
    void* const output = part_taken(c.call, c.rank, c.rank)->data;
    if (given->num_elems > 0 && given->data != output)
      std::memmove(output, given->data, c.bytes(given->num_elems));
    return;
  }
  Collective local = c.call;
  local.algorithm = Algorithm::kAuto;
  if (c.call.root >= 0) local.root = c.hosts.table.local_rank_of(c.call.root);
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  std::vector<std::size_t> input_elems, output_elems;
  for (const int peer : c.hosts.local_ranks) {
    if (const auto given = part_given(c.call, c.rank, peer)) {
      inputs.push_back(given->data);
      input_elems.push_back(given->num_elems);
    }
    if (const auto taken = part_taken(c.call, c.rank, peer)) {
      outputs.push_back(taken->data);
      output_elems.push_back(taken->num_elems);
    }
  }
  local.inputs = inputs.data();
  local.outputs = outputs.data();
  // One buffer is that of num_elems.
  local.input_elems = inputs.size() > 1 ? input_elems.data() : nullptr;
  local.output_elems = outputs.size() > 1 ? output_elems.data() : nullptr;
  c.run_local(local);
}

// gather, scatter and all_to_all; only the last waits for messages before its last step.
void move_hosts(HostsCall& c) {
  const bool is_all_to_all = c.call.root < 0;
  std::vector<std::optional<CallPart>> given;
  for (int peer = 0; peer < c.world_size; ++peer) {
    std::optional<CallPart>& part = given.emplace_back(part_given(c.call, c.rank, peer));
    // What is in place is copied before it is received into.
    if (c.is_elsewhere(peer) && is_all_to_all && part->num_elems > 0 &&
        part->data == c.call.outputs[peer])
      part->data = std::memcpy(c.exchange.stage(c.bytes(part->num_elems)), part->data,
                               c.bytes(part->num_elems));
  }
  const std::optional<CallPart> from_leader = part_taken(c.call, c.rank, c.previous_leader());
  const std::optional<CallPart>& to_leader = of(given, c.leader_at(1));
  // In an all_to_all the step of a leader's long shard may come after others that are waited for.
  const auto is_eager = [&](const std::optional<CallPart>& part) {
    return part && c.bytes(part->num_elems) <= sizeof(MessageEnvelope::data);
  };
  if (!is_all_to_all)
    c.compare_hosts(to_leader.has_value(), from_leader.has_value());
  else
    c.compare_hosts(is_eager(to_leader), is_eager(from_leader), to_leader->num_elems,
                    from_leader->num_elems);
  std::size_t num_sent = 0;  // in the last step
  const auto inside = [&] {
    if (is_all_to_all || !c.is_elsewhere(c.call.root))
      move_inside(c);
    else
      c.run_local({{.op = OpKind::kBarrier}});
  };
  const auto move_step = [&](int to, int from) {
    num_sent = 0;
    if (const auto taken = part_taken(c.call, c.rank, from); c.is_elsewhere(from) && taken)
      c.recv(from, taken->data, taken->num_elems);
    if (const auto& part = of(given, to); c.is_elsewhere(to) && part) {
      c.send(to, part->data, part->num_elems);
      if (is_all_to_all) num_sent = c.bytes(part->num_elems);
    }
  };
  move_over_hosts(
      c.rank, c.world_size, is_all_to_all, inside, [&] { return num_sent >= kSteppedBytes; },
      move_step,
      [&] {
        c.exchange.finish();
        c.exchange.finish_sends();
      });
}

void run_op(HostsCall& c) {
  switch (c.call.op) {
    case OpKind::kBarrier:
      return barrier_hosts(c);
    case OpKind::kAllReduce:
      if (c.call.algorithm != Algorithm::kOneShot &&
          (c.call.algorithm != Algorithm::kHierarchical ||
           c.call.num_bytes() > one_step_max_bytes(c.num_hosts())))
        return run_by_chunks(c);
      reduce_hosts(c);
      return broadcast_inside(c, 0, c.call.outputs[0]);
    case OpKind::kReduceScatter:
    case OpKind::kAllGather:
      return run_by_chunks(c);
    case OpKind::kReduce:
      if (!c.is_ring()) return reduce_hosts(c);
      c.compare_hosts(false, false);
      return chain_hosts(c, c.hosts.representatives(c.call.root));
    case OpKind::kBroadcast:
      return broadcast_hosts(c);
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kAllToAll:
      return move_hosts(c);
    default:
      throw std::invalid_argument(std::string(name_of(c.call.op)) + " is not a collective");
  }
}

}  // namespace

void HostsCall::compare_hosts(bool sends_to_next, bool receives_from_previous,
                              std::size_t sent_elems, std::size_t received_elems) const {
  if (hosts.local_rank != 0) return;
  if (hosts.host > 0 && !receives_from_previous) recv(previous_leader(), nullptr, received_elems);
  if (hosts.host + 1 < num_hosts() && !sends_to_next) send(leader_at(1), nullptr, sent_elems);
}

void HostsCall::run_local(Collective part) {
  if (local == nullptr) return;
  part.set_number(call.seq, static_cast<int>(hosts.local_ranks.size()));
  part.whole_op = call.op;
  part.whole = digest_of(exchange.header());
  local->plan(part);
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - RunningClock::now());
  const WaitLimits part_limits{
      .timeout = std::clamp(left, std::chrono::milliseconds(1), limits.timeout),
      .is_interrupted = limits.is_interrupted};
  const recorder::Span traced([&] {
    return recorder::Event{.num_bytes = part.num_bytes(),
                           .kind = recorder::Kind::kPart,
                           .op = part.op,
                           .algorithm = part.algorithm};
  });
  try {
    const Traffic moved = local->run(part, part_limits);
    traffic.sent_bytes += moved.sent_bytes;
    traffic.copied_bytes += moved.copied_bytes;
  } catch (WaitFailed& failed) {
    if (failed.peer >= 0) failed.peer = of(hosts.local_ranks, failed.peer);
    throw;
  } catch (Mismatched& mismatched) {
    mismatched.peer = of(hosts.local_ranks, mismatched.peer);
    CallHeader& theirs = mismatched.theirs;
    if (mismatched.difference.empty() && theirs.seq == call.seq && theirs.whole_op == call.op)
      mismatched.difference = "rank " + std::to_string(mismatched.peer) +
                              " passed other sizes or arguments; all ranks must pass the same "
                              "shape, dtype and arguments";
    theirs = {.seq = theirs.seq, .op = theirs.whole_op, .whole = theirs.whole};
    throw;
  }
}

void plan_message_collective(int world_size, const CommunicatorOptions& options, Collective& call) {
  const std::size_t num_bytes = total_bytes(call, world_size);
  if (call.op == OpKind::kAllReduce) {
    if (call.algorithm == Algorithm::kAuto) call.algorithm = options.algorithm;
    if (call.algorithm == Algorithm::kAuto) {
      const std::size_t one_shot_max_bytes = options.one_shot_max_bytes > 0
                                                 ? options.one_shot_max_bytes
                                                 : one_step_max_bytes(world_size);
      // The ring has more steps, each of which may wait for a core.
      call.algorithm = num_bytes <= one_shot_max_bytes ? Algorithm::kOneShot
                       : num_bytes < 4 * kMiB          ? Algorithm::kTwoShot
                                                       : Algorithm::kRing;
    }
    // The ring does not reduce in rank order; two_shot does.
    if (call.algorithm == Algorithm::kRing && options.is_rank_ordered)
      call.algorithm = Algorithm::kTwoShot;
    return;
  }
  const bool takes_ring =
      call.op == OpKind::kReduce || call.op == OpKind::kReduceScatter  ? !options.is_rank_ordered
      : call.op == OpKind::kAllGather || call.op == OpKind::kBroadcast ? world_size > 2
                                                                       : false;
  call.algorithm = takes_ring && num_bytes >= kRingMinBytes ? Algorithm::kRing : Algorithm::kDirect;
}

Traffic run_message_collective(HostsCall call, const HostsView& flat) {
  if (call.hosts.local_rank == 0 && call.hosts.host > 0)
    call.exchange.open_first(call.previous_leader());
  if (call.call.algorithm == Algorithm::kHierarchical || call.hosts.is_flat()) {
    run_op(call);
  } else {
    // The hosts compare their calls, as for any other one.
    call.compare_hosts(false, false);
    call.run_local({{.op = OpKind::kBarrier}});
    call.exchange.finish();
    HostsCall by_ranks{flat, nullptr, call.exchange, call.call, call.limits};
    run_op(by_ranks);
  }
  call.exchange.finish_all();
  call.traffic.sent_bytes += call.exchange.sent_bytes();
  return call.traffic;
}

}  // namespace ringcomm
