#include "transport/messages/collectives.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>

#include "collectives/algorithm.h"
#include "collectives/op_kind.h"
#include "collectives/trace.h"
#include "core/chunk_layout.h"
#include "core/host_order.h"

namespace ringcomm {
namespace {

// The limits were measured over Gloo on one machine with two cores and other load
// (docs/design/messages.md); half and double of each differ by less than the noise.

// From this size of the whole call, bandwidth costs more than latency, so every link should be busy
// with its part.
constexpr std::size_t kRingMinBytes = std::size_t{1} << 20;

// one_shot sends N/2 times the bytes of two_shot, and saves one of its two steps: with two ranks
// nothing but the step differs. The ring has more steps, each of which may wait for a core.
Algorithm choose_all_reduce_of_messages(std::size_t num_bytes, int world_size,
                                        std::size_t one_shot_max_bytes) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  if (one_shot_max_bytes == 0)
    one_shot_max_bytes = world_size == 2 ? kMiB : kMiB / 2 / static_cast<std::size_t>(world_size);
  if (num_bytes <= one_shot_max_bytes) return Algorithm::kOneShot;
  return num_bytes < 4 * kMiB ? Algorithm::kTwoShot : Algorithm::kRing;
}

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

// Up to here one message step between leaders beats two in which every rank has its part, with two
// hosts (0.9 to 7 ms against 12 at 1 MiB, and still 24 against 29 at 16 MiB, over Gloo on one busy
// machine). It sends H/2 times the bytes, all by one rank: less where hosts are more.
std::size_t leader_max_bytes(int num_hosts) {
  return (std::size_t{2} << 20) / static_cast<std::size_t>(num_hosts);
}

// The maximum of other ranks' data that a rank stages at a time; larger buffers are cut into
// pieces. The latency of a message is small next to what it takes on a fast network.
constexpr std::size_t kStagingBytes = std::size_t{8} << 20;

// From this size, a shard is received before the next one is sent to another rank: many connections
// at a time lose packets on a shared cable.
constexpr std::size_t kSteppedBytes = std::size_t{256} << 10;

// Where two ranks have other bytes for the shard of `owner`.
std::string table_difference(std::size_t owner, int a, std::uint64_t a_bytes, int b,
                             std::uint64_t b_bytes) {
  return "the shard of rank " + std::to_string(owner) + " has " + std::to_string(a_bytes) +
         " bytes for rank " + std::to_string(a) + ", and " + std::to_string(b_bytes) +
         " bytes for rank " + std::to_string(b);
}

// What `values` has for a rank or a host.
template <class Values>
auto& of(Values& values, int number) {
  return values[static_cast<std::size_t>(number)];
}

// Of a broadcast or all_gather: between two ranks either form is the same message, and in one piece
// it starts once.
bool takes_chain(std::size_t num_bytes, int num_ranks) {
  return num_bytes >= kRingMinBytes && num_ranks > 2;
}

// One collective of one rank. A rank is a number in the group; a local rank is a number among its
// host's ranks, and only calls of run_local() use it. Over messages alone every rank is a host.
class HostsCollective {
 public:
  HostsCollective(const MessageGroup& group, const HostsView& hosts, const Collective& call,
                  const CallHeader& header, const WaitLimits& limits)
      : hosts_(hosts),
        local_(hosts.local_ranks.size() > 1 ? group.local : nullptr),
        messages_(group.messages),
        call_(call),
        header_(header),
        limits_(limits),
        deadline_(deadline_after(limits.timeout)),
        rank_(hosts.rank),
        world_size_(hosts.table.world_size()),
        element_bytes_(element_bytes(call.dtype)),
        traffic_{.algorithm = header.algorithm} {}

  Traffic run() {
    dispatch();
    return traffic_;
  }

  // ---- The same call everywhere.

  // Compares the calls of this host's ranks, and their sizes: whole tables of shards, or the pairs
  // of ranks on this host. Pairs on two hosts are compared when the data arrives. All ranks of the
  // host throw the same Mismatched, and none returns before all have arrived.
  void agree() {
    if (local_size() == 1) return;
    // A record: the header, and for every rank the elements given to it and expected from it.
    constexpr std::size_t kHeaderWords = sizeof(CallHeader) / sizeof(std::uint64_t);
    static_assert(sizeof(CallHeader) % sizeof(std::uint64_t) == 0);
    const std::size_t record_words = kHeaderWords + 2 * static_cast<std::size_t>(world_size_);
    std::vector<std::uint64_t> mine(record_words), all(record_words * hosts_.local_ranks.size());
    std::memcpy(mine.data(), &header_, sizeof(header_));
    for (int peer = 0; peer < world_size_; ++peer) {
      const auto given = part_given(call_, rank_, peer), taken = part_taken(call_, rank_, peer);
      const std::size_t entry = kHeaderWords + 2 * static_cast<std::size_t>(peer);
      mine[entry] = given ? given->num_elems : 0;
      mine[entry + 1] = taken ? taken->num_elems : 0;
    }
    const void* inputs[] = {mine.data()};
    std::vector<void*> outputs;
    for (std::size_t local = 0; local < hosts_.local_ranks.size(); ++local)
      outputs.push_back(all.data() + local * record_words);
    run_local({.op = OpKind::kAllGather,
               .num_elems = record_words * sizeof(std::uint64_t),
               .inputs = inputs,
               .outputs = outputs.data()},
              false);

    const auto bytes_of = [&](int local, int peer, bool is_given) {
      const std::size_t entry = kHeaderWords + 2 * static_cast<std::size_t>(peer) + !is_given;
      return all[static_cast<std::size_t>(local) * record_words + entry] * element_bytes_;
    };
    const auto header_from = [&](int local) {
      CallHeader theirs;
      std::memcpy(&theirs, of(outputs, local), sizeof(theirs));
      return theirs;
    };
    const auto fail = [&](int local, const std::string& difference) {
      throw Mismatched{
          .peer = global(local), .theirs = header_from(local), .difference = difference};
    };
    for (int local = 0; local < local_size(); ++local)
      if (!is_compatible(header_from(local), header_)) fail(local, "");
    for (int from = 0; from < local_size(); ++from)
      for (int to = 0; to < local_size(); ++to) {
        const std::uint64_t given = bytes_of(from, global(to), true);
        const std::uint64_t expected = bytes_of(to, global(from), false);
        if (given != expected)
          fail(from, size_difference(global(from), given, global(to), expected));
      }
    const bool is_given = call_.op == OpKind::kReduceScatter;
    if (!is_given && call_.op != OpKind::kAllGather) return;
    for (int local = 1; local < local_size(); ++local)
      for (int owner = 0; owner < world_size_; ++owner) {
        const std::uint64_t theirs = bytes_of(local, owner, is_given);
        const std::uint64_t firsts = bytes_of(0, owner, is_given);
        if (theirs != firsts)
          fail(local, table_difference(static_cast<std::size_t>(owner), global(local), theirs,
                                       global(0), firsts));
      }
  }

  // Before messages that carry no header: the leaders compare their neighbours', in one step, and
  // `table`, which is of the shards' bytes.
  void meet(const std::vector<std::uint64_t>& table = {}) {
    const std::size_t num_bytes = table.size() * sizeof(std::uint64_t);
    // The context's: the messenger may still use it when an exception has left this function.
    std::byte* const theirs = messages_.stage(2 * num_bytes);
    if (num_bytes > 0) std::memcpy(theirs + num_bytes, table.data(), num_bytes);
    MessageExchange exchange(messages_, header_);
    if (hosts_.local_rank == 0) {
      exchange.recv(previous_leader(), theirs, num_bytes);
      exchange.send(leader_at(1), theirs + num_bytes, num_bytes);
    }
    exchange.finish();
    run_local({.op = OpKind::kBarrier});
    for (std::size_t owner = 0; owner < table.size(); ++owner) {
      std::uint64_t there = 0;
      std::memcpy(&there, theirs + owner * sizeof(there), sizeof(there));
      if (there != table[owner])
        throw Mismatched{
            .peer = previous_leader(),
            .theirs = header_,
            .difference = table_difference(owner, previous_leader(), there, rank_, table[owner])};
    }
  }

 private:
  // The leaders exchange headers by dissemination, and each compares the other's: in step s with
  // the host 2^s before it. A rank that returns knows that all ranks have arrived at this call.
  void barrier() {
    MessageExchange exchange(messages_, header_);
    int num_steps = 0;
    while (1 << num_steps < num_hosts()) ++num_steps;
    for (int step = 0; hosts_.local_rank == 0 && step < num_steps; ++step) {
      const int distance = 1 << step;
      messages_.step() = {step + 1, num_steps, 1, 1};
      exchange.recv(leader_at(num_hosts() - distance), nullptr, 0);
      exchange.send(leader_at(distance), nullptr, 0);
      exchange.finish();
    }
    run_local({.op = OpKind::kBarrier});
  }

  // The leader of each host but the first receives from the one before it, if only a header, and
  // before anything else: if calls differ, those of two such neighbours do, and the second notices
  // it, whatever their patterns. The first host's leader waits for nobody here. The arguments say
  // whether the leader sends data to the next one at once, and receives such from the one before.
  void greet(MessageExchange& exchange, bool sends_to_next, bool receives_from_previous) {
    if (hosts_.local_rank != 0) return;
    if (hosts_.host > 0 && !receives_from_previous) exchange.recv(previous_leader(), nullptr, 0);
    if (hosts_.host + 1 < num_hosts() && !sends_to_next) exchange.send(leader_at(1), nullptr, 0);
  }

  void dispatch() {
    switch (call_.op) {
      case OpKind::kBarrier:
        return barrier();
      case OpKind::kAllReduce:
        return all_reduce();
      case OpKind::kReduceScatter:
        return reduce_scatter(ShardTable::of_call(call_, rank_, world_size_));
      case OpKind::kAllGather:
        copy_own(call_.num_elems, call_.inputs[0], call_.outputs[rank_]);
        return all_gather(ShardTable::of_call(call_, rank_, world_size_));
      case OpKind::kReduce:
        return is_ring() ? chain() : reduce();
      case OpKind::kBroadcast:
        return broadcast();
      case OpKind::kGather:
      case OpKind::kScatter:
      case OpKind::kAllToAll:
        return move();
      default:
        throw std::invalid_argument(std::string(name_of(call_.op)) + " is not a collective");
    }
  }

  bool is_ring() const { return header_.algorithm == Algorithm::kRing; }

  bool is_elsewhere(int peer) const { return hosts_.table.host_of(peer) != hosts_.host; }
  int num_hosts() const { return hosts_.num_hosts(); }
  int local_size() const { return static_cast<int>(hosts_.local_ranks.size()); }
  int global(int local) const { return of(hosts_.local_ranks, local); }
  int leader_at(int distance) const {
    return hosts_.table.leader_of((hosts_.host + distance) % num_hosts());
  }
  int previous_leader() const { return leader_at(num_hosts() - 1); }
  std::size_t bytes(std::size_t num_elems) const { return num_elems * element_bytes_; }
  void count_sent(std::uint64_t num_bytes) { traffic_.sent_bytes += num_bytes; }
  void send(MessageExchange& exchange, int peer, const void* data, std::size_t num_elems) {
    exchange.send(peer, data, bytes(num_elems));
    count_sent(bytes(num_elems));
    messages_.count(peer, bytes(num_elems), 0);
  }
  void recv(MessageExchange& exchange, int peer, void* data, std::size_t num_elems) {
    exchange.recv(peer, data, bytes(num_elems));
    messages_.count(peer, 0, bytes(num_elems));
  }

  void copy_own(std::size_t num_elems, const void* input, void* output) const {
    if (num_elems > 0 && input != output) std::memmove(output, input, bytes(num_elems));
  }

  // ---- Through one rank of each host, or directly to the root.

  void all_reduce() {
    const bool is_short = call_.num_bytes() <= leader_max_bytes(num_hosts());
    if (header_.algorithm == Algorithm::kOneShot ||
        (header_.algorithm == Algorithm::kHierarchical && is_short)) {
      reduce();
      return broadcast_inside(0, call_.outputs[0]);
    }
    const ShardTable shards = ShardTable::of_call(call_, rank_, world_size_);
    if (is_ring()) return ring(shards, {});
    reduce_scatter(shards);
    all_gather(shards);
  }

  void ring(const ShardTable& shards, const RingHalves& halves) {
    meet(shards.table());
    count_sent(run_message_ring(messages_, shards, halves));
  }

  void chain() {
    meet();
    const std::vector<int> ranks = hosts_.representatives(call_.root);
    if (rank_ == of(ranks, hosts_.host)) count_sent(run_message_chain(messages_, call_, ranks));
  }

  // To the root, or in a short all_reduce to all leaders: one rank of each host has its sum, and
  // sends it to those that add them up in the order of the hosts.
  void reduce() {
    const std::vector<int> ranks = hosts_.representatives(call_.root);
    const int representative = of(ranks, hosts_.host);
    const bool receives = rank_ == (call_.root < 0 ? representative : call_.root);
    const std::size_t max_elems =
        std::clamp<std::size_t>(kStagingBytes / ranks.size() / element_bytes_, 1,
                                std::max<std::size_t>(1, call_.num_elems));
    std::vector<std::byte*> sums(ranks.size());  // by host
    for (int host = 0; host < num_hosts(); ++host)
      if (host != hosts_.host ? receives : local_ != nullptr && rank_ == representative)
        of(sums, host) = messages_.stage(bytes(max_elems));
    MessageExchange exchange(messages_, header_);
    if (call_.root >= 0) greet(exchange, call_.root == leader_at(1), receives);
    // One piece at least, because headers are exchanged even without data.
    const std::size_t num_pieces = std::max<std::size_t>(1, num_slices(call_.num_elems, max_elems));
    for (std::size_t idx = 0; idx < num_pieces; ++idx) {
      const ElemRange piece = slice_of({0, call_.num_elems}, idx, max_elems);
      messages_.step() = {1, 1, idx + 1, num_pieces};
      const void* input = at(call_.inputs[0], piece.begin_elems, element_bytes_);
      if (local_ != nullptr) {
        void* output = of(sums, hosts_.host);
        run_local({.op = OpKind::kReduce,
                   .dtype = call_.dtype,
                   .reduction = undivided(call_.reduction),
                   .root = hosts_.table.local_rank_of(representative),
                   .num_elems = piece.num_elems,
                   .inputs = &input,
                   .outputs = &output});
        input = output;
      }
      for (const int host : hosts_.other_hosts) {
        if (rank_ != representative) break;
        const int peer = of(ranks, host);
        if (receives) recv(exchange, peer, of(sums, host), piece.num_elems);
        if (call_.root < 0 || peer == call_.root) send(exchange, peer, input, piece.num_elems);
      }
      exchange.finish();
      if (!receives || piece.num_elems == 0) continue;
      std::vector<const void*> sources(sums.begin(), sums.end());
      of(sources, hosts_.host) = input;
      reduce_op_of(call_).combine(at(call_.outputs[0], piece.begin_elems, element_bytes_), nullptr,
                                  sources.data(), num_hosts(), piece.num_elems,
                                  divisor_of(call_, world_size_));
    }
  }

  void broadcast() {
    const std::vector<int> ranks = hosts_.representatives(call_.root);
    const int representative = of(ranks, hosts_.host);
    takes_chain(call_.num_bytes(), num_hosts()) ? chain() : broadcast_down_tree(ranks);
    broadcast_inside(hosts_.table.local_rank_of(representative),
                     rank_ == call_.root ? call_.inputs[0] : call_.outputs[0]);
  }

  // A binomial one.
  void broadcast_down_tree(const std::vector<int>& ranks) {
    const int num_ranks = num_hosts();
    const int root = hosts_.table.host_of(call_.root);
    const int place = (hosts_.host - root + num_ranks) % num_ranks;  // the root's is 0
    const auto rank_at = [&](int other) { return of(ranks, (other + root) % num_ranks); };
    const bool takes_part = rank_ == rank_at(place);
    MessageExchange exchange(messages_, header_);
    // Others forward data when they have it, and their header must not wait for that.
    greet(exchange, takes_part && place == 0, place == 1 && call_.root == previous_leader());
    int bit = 1;
    while (bit < num_ranks && (place & bit) == 0) bit <<= 1;
    if (place != 0 && takes_part) {
      recv(exchange, rank_at(place - bit), call_.outputs[0], call_.num_elems);
      exchange.finish();
    }
    for (bit >>= 1; bit > 0 && takes_part; bit >>= 1) {
      if (place + bit >= num_ranks) continue;
      send(exchange, rank_at(place + bit), place == 0 ? call_.inputs[0] : call_.outputs[0],
           call_.num_elems);
    }
    exchange.finish();
  }

  void broadcast_inside(int local_root, const void* from) {
    const void* inputs[] = {from};
    run_local({.op = OpKind::kBroadcast,
               .dtype = call_.dtype,
               .element_name = call_.element_name,
               .root = local_root,
               .num_elems = call_.num_elems,
               .inputs = inputs,
               .outputs = call_.outputs});
  }

  // gather, scatter and all_to_all; only the last waits for messages before its last step.
  void move() {
    std::vector<std::optional<CallPart>> given;
    for (int peer = 0; peer < world_size_; ++peer) {
      std::optional<CallPart>& part = given.emplace_back(part_given(call_, rank_, peer));
      // What is in place is copied before it is received into.
      if (is_elsewhere(peer) && part && part->num_elems > 0 && call_.op == OpKind::kAllToAll &&
          part->data == call_.outputs[peer])
        part->data = std::memcpy(messages_.stage(bytes(part->num_elems)), part->data,
                                 bytes(part->num_elems));
    }
    const bool is_all_to_all = call_.root < 0;
    MessageExchange exchange(messages_, header_);
    if (!is_all_to_all)
      greet(exchange, of(given, leader_at(1)).has_value(),
            part_taken(call_, rank_, previous_leader()).has_value());
    std::size_t num_sent = 0;  // in the last step
    const auto inside = [&] {
      if (is_all_to_all || hosts_.table.host_of(call_.root) == hosts_.host) move_inside();
    };
    const auto move_step = [&](int to, int from) {
      num_sent = 0;
      if (const auto taken = part_taken(call_, rank_, from); is_elsewhere(from) && taken)
        recv(exchange, from, taken->data, taken->num_elems);
      if (const auto& part = of(given, to); is_elsewhere(to) && part) {
        send(exchange, to, part->data, part->num_elems);
        if (is_all_to_all) num_sent = bytes(part->num_elems);
      }
    };
    move_over_hosts(
        rank_, world_size_, is_all_to_all, inside, [&] { return num_sent >= kSteppedBytes; },
        move_step, [&] { exchange.finish(); });
  }

  // The call as this host's ranks see it: the others' shards left out.
  void move_inside() {
    if (local_ == nullptr) {
      const auto given = part_given(call_, rank_, rank_);
      return copy_own(given->num_elems, given->data, part_taken(call_, rank_, rank_)->data);
    }
    Collective local = call_;
    if (call_.root >= 0) local.root = hosts_.table.local_rank_of(call_.root);
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    std::vector<std::size_t> input_elems, output_elems;
    for (const int peer : hosts_.local_ranks) {
      if (const auto given = part_given(call_, rank_, peer)) {
        inputs.push_back(given->data);
        input_elems.push_back(given->num_elems);
      }
      if (const auto taken = part_taken(call_, rank_, peer)) {
        outputs.push_back(taken->data);
        output_elems.push_back(taken->num_elems);
      }
    }
    local.inputs = inputs.data();
    local.outputs = outputs.data();
    // One buffer is that of num_elems.
    local.input_elems = inputs.size() > 1 ? input_elems.data() : nullptr;
    local.output_elems = outputs.size() > 1 ? output_elems.data() : nullptr;
    run_local(local);
  }

  // ---- By all ranks: each chunk crosses the network once per host.

  // The elements of a piece of all chunks. Two pieces are staged at the same time. Over messages
  // alone there is nothing to do in a host meanwhile, and an all_gather stages nothing.
  std::size_t piece_elems(const ShardTable& shards, OpKind op) const {
    const std::size_t most_elems = std::max<std::size_t>(1, shards.max_elems());
    if (hosts_.is_flat() && op == OpKind::kAllGather) return most_elems;
    return std::clamp<std::size_t>(
        kStagingBytes / (2 * static_cast<std::size_t>(world_size_) * element_bytes_), 1,
        most_elems);
  }

  // Calls post(exchange, k) for all pieces in order, and complete(exchange, k) once piece k + 1 is
  // posted: messages are on their way while this host's ranks work on another piece.
  template <class Post, class Complete>
  void in_pieces(int step, std::size_t num_elems, std::size_t max_elems, const Post& post,
                 const Complete& complete) {
    // One at least, because headers are exchanged even without data.
    const std::size_t num_pieces = std::max<std::size_t>(1, num_slices(num_elems, max_elems));
    const int num_steps = call_.op == OpKind::kAllReduce ? 2 : 1;
    MessageExchange exchanges[] = {{messages_, header_}, {messages_, header_}};
    for (std::size_t idx = 0; idx <= num_pieces; ++idx) {
      messages_.step() = {std::min(step, num_steps), num_steps, std::max<std::size_t>(1, idx),
                          num_pieces};
      if (idx < num_pieces) post(exchanges[idx % 2], idx);
      if (idx > 0) complete(exchanges[(idx - 1) % 2], idx - 1);
    }
  }

  // Leaves this rank's chunk, reduced over all ranks, in its output. The ranks of a host reduce
  // what they have for each rank, its rail peer sends that, and the owner adds up the hosts in
  // their order: one rounding inside a host, and one between them.
  void reduce_scatter(const ShardTable& shards) {
    if (is_ring()) return ring(shards, {.has_all_gather = false});
    const std::size_t max_elems = piece_elems(shards, OpKind::kReduceScatter);
    // Two halves, each with room for what comes from each host, and what is sent in each round.
    const std::size_t num_sent = local_ != nullptr ? hosts_.rounds.size() : 0;
    const std::size_t num_slots = num_sent + static_cast<std::size_t>(num_hosts());
    std::byte* const staging = messages_.stage(2 * num_slots * bytes(max_elems));
    const auto slot = [&](std::size_t idx, std::size_t number) {
      return staging + (idx % 2 * num_slots + number) * bytes(max_elems);
    };
    const auto received = [&](std::size_t idx, int host) {
      return slot(idx, num_sent + static_cast<std::size_t>(host));
    };
    const auto post = [&](MessageExchange& exchange, std::size_t idx) {
      for (const int host : hosts_.other_hosts)
        recv(exchange, hosts_.rail_peer(rank_, host), received(idx, host),
             shards.slice(rank_, idx, max_elems).num_elems);
      for (std::size_t round = 0; round < hosts_.rounds.size(); ++round) {
        const std::vector<int>& owners = hosts_.rounds[round];
        run_for(OpKind::kReduceScatter, owners, shards, max_elems, idx, slot(idx, round));
        const int owner = of(owners, hosts_.local_rank);
        if (owner < 0) continue;
        const ElemRange part = shards.slice(owner, idx, max_elems);
        send(exchange, owner, local_ != nullptr ? slot(idx, round) : shards.input(owner, part),
             part.num_elems);
      }
    };
    const auto complete = [&](MessageExchange& exchange, std::size_t idx) {
      const ElemRange own = shards.slice(rank_, idx, max_elems);
      std::byte* output = shards.output(rank_, own);
      run_for(OpKind::kReduceScatter, hosts_.local_ranks, shards, max_elems, idx, output);
      exchange.finish();
      if (own.num_elems == 0) return;
      std::vector<const void*> sources;
      for (int host = 0; host < num_hosts(); ++host) sources.push_back(received(idx, host));
      of(sources, hosts_.host) = local_ != nullptr ? output : shards.input(rank_, own);
      shards.op->combine(output, nullptr, sources.data(), num_hosts(), own.num_elems,
                         shards.divisor);
    };
    in_pieces(1, shards.max_elems(), max_elems, post, complete);
  }

  // Every rank's chunk is in its own output before, and in all ranks' after. A rank sends its chunk
  // to its rail peer on each other host, and the ranks there copy it.
  void all_gather(const ShardTable& shards) {
    if (is_ring()) return ring(shards, {.has_reduce_scatter = false});
    const std::size_t max_elems = piece_elems(shards, OpKind::kAllGather);
    const auto post = [&](MessageExchange& exchange, std::size_t idx) {
      const ElemRange own = shards.slice(rank_, idx, max_elems);
      for (const auto& owners : hosts_.rounds) {
        const int owner = of(owners, hosts_.local_rank);
        if (owner < 0) continue;
        const ElemRange theirs = shards.slice(owner, idx, max_elems);
        recv(exchange, owner, shards.output(owner, theirs), theirs.num_elems);
      }
      for (const int host : hosts_.other_hosts)
        send(exchange, hosts_.rail_peer(rank_, host), shards.output(rank_, own), own.num_elems);
      run_for(OpKind::kAllGather, hosts_.local_ranks, shards, max_elems, idx, nullptr);
    };
    const auto complete = [&](MessageExchange& exchange, std::size_t idx) {
      exchange.finish();
      for (const auto& owners : hosts_.rounds)
        run_for(OpKind::kAllGather, owners, shards, max_elems, idx, nullptr);
    };
    in_pieces(2, shards.max_elems(), max_elems, post, complete);
  }

  // A collective of piece `idx` of the owners' chunks, one for each rank of this host: each rank
  // reduces its owner's into `to`, or all copy all.
  void run_for(OpKind op, const std::vector<int>& owners, const ShardTable& shards,
               std::size_t max_elems, std::size_t idx, std::byte* to) {
    if (local_ == nullptr) return;
    const bool reduces = op == OpKind::kReduceScatter;
    std::vector<void*> parts;
    std::vector<std::size_t> elems;
    for (const int owner : owners) {
      const ElemRange part = owner < 0 ? ElemRange{} : shards.slice(owner, idx, max_elems);
      parts.push_back(owner < 0 ? nullptr
                      : reduces ? const_cast<std::byte*>(shards.input(owner, part))
                                : shards.output(owner, part));
      elems.push_back(part.num_elems);
    }
    if (std::ranges::all_of(elems, [](std::size_t n) { return n == 0; })) return;
    const void* input[] = {of(parts, hosts_.local_rank)};
    void* output[] = {to};
    run_local({.op = op,
               .dtype = call_.dtype,
               .reduction = undivided(call_.reduction),
               .num_elems = of(elems, hosts_.local_rank),
               .inputs = reduces ? parts.data() : input,
               .outputs = reduces ? output : parts.data(),
               .input_elems = reduces ? elems.data() : nullptr,
               .output_elems = reduces ? nullptr : elems.data()});
  }

  // ---- Inside this host.

  // Runs a part of the call by this host's ranks, if there are several, which `call` numbers from
  // 0. Throws Stopped and Mismatched with the group's numbers. Counts the bytes if `is_data`.
  void run_local(const Collective& call, bool is_data = true) {
    if (local_ == nullptr) return;
    CallHeader header = header_of(call, header_.seq, local_size());
    local_->plan(call, header);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - RunningClock::now());
    const WaitLimits limits{
        .timeout = std::clamp(left, std::chrono::milliseconds(1), limits_.timeout),
        .is_interrupted = limits_.is_interrupted};
    const recorder::Span traced([&] {
      return recorder::Event{.num_bytes = call.num_bytes(),
                             .kind = recorder::Kind::kPart,
                             .op = call.op,
                             .algorithm = header.algorithm};
    });
    try {
      const Traffic traffic = local_->run(call, header, limits);
      if (!is_data) return;
      traffic_.sent_bytes += traffic.sent_bytes;
      traffic_.copied_bytes += traffic.copied_bytes;
    } catch (Stopped& stopped) {
      if (stopped.peer >= 0) stopped.peer = global(stopped.peer);
      throw;
    } catch (Mismatched& mismatched) {
      mismatched.peer = global(mismatched.peer);
      throw;
    }
  }

  const HostsView& hosts_;
  Transport* local_;  // null where this rank is alone on its host
  MessageContext& messages_;
  const Collective& call_;
  const CallHeader& header_;
  const WaitLimits& limits_;
  RunningClock::time_point deadline_;
  int rank_;
  int world_size_;
  std::size_t element_bytes_;
  Traffic traffic_;
};

}  // namespace

void plan_message_collective(int world_size, const Collective& call,
                             const CommunicatorOptions& options, CallHeader& header) {
  const std::size_t num_bytes = total_bytes(call, world_size);
  bool is_ring = false;
  header.algorithm = Algorithm::kDirect;
  if (call.op == OpKind::kAllReduce) {
    header.algorithm = call.algorithm != Algorithm::kAuto ? call.algorithm : options.algorithm;
    if (header.algorithm == Algorithm::kAuto)
      header.algorithm =
          choose_all_reduce_of_messages(num_bytes, world_size, options.one_shot_max_bytes);
    // The ring does not reduce in rank order; two_shot does.
    if (header.algorithm == Algorithm::kRing && options.is_rank_ordered)
      header.algorithm = Algorithm::kTwoShot;
  } else if (call.op == OpKind::kReduce || call.op == OpKind::kReduceScatter) {
    is_ring = num_bytes >= kRingMinBytes && !options.is_rank_ordered;
  } else if (call.op == OpKind::kAllGather || call.op == OpKind::kBroadcast) {
    is_ring = takes_chain(num_bytes, world_size);
  }
  if (is_ring) header.algorithm = Algorithm::kRing;
}

Traffic run_message_collective(const MessageGroup& group, const Collective& call,
                               const CallHeader& header, const WaitLimits& limits) {
  HostsCollective by_hosts(group, group.hosts, call, header, limits);
  by_hosts.agree();
  if (header.algorithm == Algorithm::kHierarchical || group.hosts.is_flat()) return by_hosts.run();
  by_hosts.meet();
  return HostsCollective(group, group.flat, call, header, limits).run();
}

}  // namespace ringcomm
