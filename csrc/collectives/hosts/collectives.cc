#include "collectives/messages/collectives.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "collectives/hosts/carrier.h"
#include "collectives/messages/shares.h"
#include "collectives/collective.h"
#include "collectives/trace.h"
#include "core/chunk_layout.h"

namespace ringcomm {
namespace {

// Up to here one message step between leaders beats two in which every rank has its part, with two
// hosts (0.9 to 7 ms against 12 at 1 MiB, and still 24 against 29 at 16 MiB, over Gloo on one busy
// machine). It sends H/2 times the bytes, all of them by one rank: less where hosts are more.
std::size_t leader_max_bytes(int num_hosts) {
  return (std::size_t{2} << 20) / static_cast<std::size_t>(num_hosts);
}

// The maximum of other ranks' data that a rank stages at a time; larger buffers are cut into
// pieces. It takes some milliseconds on a fast network, so the latency of a message is small next
// to it.
constexpr std::size_t kStagingBytes = std::size_t{8} << 20;
// As much of one rank's buffer in a reduce.
constexpr std::size_t kReducePieceBytes = std::size_t{4} << 20;

// There are two numberings: a rank is a number in the group; a local rank is a number among its
// host's ranks, and only calls of run_local() use it.
class HostsCollective {
 public:
  HostsCollective(const HostsGroup& group, const Collective& call, const CallHeader& header,
                  const WaitLimits& limits)
      : peer_table_(group.peer_table),
        local_(group.local),
        messages_(group.messages),
        options_(group.options),
        call_(call),
        header_(header),
        limits_(limits),
        deadline_(deadline_after(limits.timeout)),
        rank_(messages_.rank()),
        world_size_(messages_.world_size()),
        host_(peer_table_.host_of(rank_)),
        local_rank_(peer_table_.local_rank_of(rank_)),
        local_ranks_(peer_table_.ranks_on(host_)),
        other_hosts_(make_other_hosts()),
        rounds_(make_rounds()),
        element_bytes_(element_bytes(call.dtype)),
        traffic_{.algorithm = header.algorithm} {}

  Traffic run() {
    agree();
    if (header_.algorithm != Algorithm::kHierarchical) {
      barrier();
      count_sent(run_message_collective(messages_, call_, header_));
    } else {
      dispatch();
    }
    return traffic_;
  }

 private:
  int num_hosts() const { return peer_table_.num_hosts(); }
  int local_size() const { return static_cast<int>(local_ranks_.size()); }
  int global(int local) const { return local_ranks_[static_cast<std::size_t>(local)]; }
  void count_sent(std::uint64_t num_bytes) { traffic_.sent_bytes += num_bytes; }

  void dispatch() {
    switch (call_.op) {
      case OpKind::kBarrier:
        return barrier();
      case OpKind::kAllReduce:
        return all_reduce();
      case OpKind::kReduceScatter:
        return reduce_scatter(MessageShares::of_reduce_scatter(call_, rank_, world_size_));
      case OpKind::kAllGather:
        return all_gather(MessageShares::of_all_gather(call_, rank_, world_size_));
      case OpKind::kReduce:
        return reduce();
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

  // ---- Who does what.

  // One rank of each host, by host: the root of its own, if there is one, else the leader.
  std::vector<int> representatives(int root) const {
    std::vector<int> ranks;
    for (int host = 0; host < num_hosts(); ++host) ranks.push_back(peer_table_.leader_of(host));
    if (root >= 0) ranks[static_cast<std::size_t>(peer_table_.host_of(root))] = root;
    return ranks;
  }

  // For a rank on another host, one of this host's ranks is its courier: the one of its own local
  // rank, modulo this host's size. If the other host has more ranks, a courier serves several of
  // them in rounds.
  int courier_of(int rank, int host) const {
    return peer_table_.ranks_on(host)[static_cast<std::size_t>(peer_table_.local_rank_of(rank) %
                                                               peer_table_.num_ranks_on(host))];
  }

  // By round: the ranks that this host's ranks serve, by local rank; -1 for none.
  std::vector<std::vector<int>> make_rounds() const {
    std::vector<std::vector<int>> rounds;
    for (const int host : other_hosts_) {
      const std::vector<int>& theirs = peer_table_.ranks_on(host);
      for (std::size_t first = 0; first < theirs.size(); first += local_ranks_.size()) {
        rounds.emplace_back(local_ranks_.size(), -1);
        std::copy_n(theirs.begin() + static_cast<std::ptrdiff_t>(first),
                    std::min(local_ranks_.size(), theirs.size() - first), rounds.back().begin());
      }
    }
    return rounds;
  }

  // The previous one is the first.
  std::vector<int> make_other_hosts() const {
    std::vector<int> hosts;
    for (int distance = 1; distance < num_hosts(); ++distance)
      hosts.push_back((host_ + num_hosts() - distance) % num_hosts());
    return hosts;
  }

  // ---- The same call everywhere.

  // Compares the calls of this host's ranks, and their sizes: all entries if every rank has a table
  // of all shares, and otherwise the pairs of ranks on this host. Pairs of ranks on two hosts are
  // compared when the data arrives. All ranks of the host throw the same Mismatched, and none
  // returns before all have arrived.
  void agree() {
    if (local_size() == 1) return;
    // A record: the header, and for every rank the elements that are given to it and expected from
    // it.
    constexpr std::size_t kHeaderWords = sizeof(CallHeader) / sizeof(std::uint64_t);
    static_assert(sizeof(CallHeader) % sizeof(std::uint64_t) == 0);
    const std::size_t record_words = kHeaderWords + 2 * static_cast<std::size_t>(world_size_);
    std::vector<std::uint64_t> mine(record_words), all(record_words * local_ranks_.size());
    std::memcpy(mine.data(), &header_, sizeof(header_));
    for (int peer = 0; peer < world_size_; ++peer) {
      const auto given = part_given(call_, rank_, peer), taken = part_taken(call_, rank_, peer);
      const std::size_t entry = kHeaderWords + 2 * static_cast<std::size_t>(peer);
      mine[entry] = given ? given->num_elems : 0;
      mine[entry + 1] = taken ? taken->num_elems : 0;
    }
    const void* inputs[] = {mine.data()};
    std::vector<void*> outputs;
    for (std::size_t local = 0; local < local_ranks_.size(); ++local)
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
    const auto header_of = [&](int local) {
      CallHeader theirs;
      std::memcpy(&theirs, outputs[static_cast<std::size_t>(local)], sizeof(theirs));
      return theirs;
    };
    const auto fail = [&](int local, const std::string& difference) {
      throw Mismatched{.peer = global(local), .theirs = header_of(local), .difference = difference};
    };
    for (int local = 0; local < local_size(); ++local)
      if (!is_compatible(header_of(local), header_)) fail(local, "");
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

  // The leaders exchange headers in steps, and each compares the other's. A rank that returns knows
  // that all ranks have arrived at this call.
  void barrier() {
    if (local_rank_ == 0)
      messages_.among(representatives(-1), [&] {
        run_message_collective(messages_, {.op = OpKind::kBarrier}, header_);
      });
    run_local({.op = OpKind::kBarrier});
  }

  // ---- Through one rank of each host, or directly to the root.

  void all_reduce() {
    if (call_.num_bytes() <= leader_max_bytes(num_hosts())) {
      reduce();
      return broadcast_inside(0, call_.outputs[0]);
    }
    const MessageShares shares = MessageShares::of_buffer(call_, world_size_);
    reduce_scatter(shares);
    all_gather(shares);
  }

  // To the root, or in a short all_reduce to all leaders: one rank of each host has its sum, and
  // sends it. In pieces, because a root stages those of all hosts.
  void reduce() {
    if (call_.root >= 0) barrier();
    const int root_host = call_.root >= 0 ? peer_table_.host_of(call_.root) : -1;
    const std::vector<int> ranks = representatives(call_.root);
    const int representative = ranks[static_cast<std::size_t>(host_)];
    const std::size_t max_elems =
        std::min(std::max<std::size_t>(1, call_.num_elems), kReducePieceBytes / element_bytes_);
    const bool is_representative = rank_ == representative;
    std::byte* sum = is_representative ? messages_.stage(max_elems * element_bytes_) : nullptr;
    // One piece at least, because headers are exchanged even without data.
    const std::size_t num_pieces = std::max<std::size_t>(1, num_slices(call_.num_elems, max_elems));
    for (std::size_t idx = 0; idx < num_pieces; ++idx) {
      const ElemRange piece = slice_of({0, call_.num_elems}, idx, max_elems);
      const void* inputs[] = {at(call_.inputs[0], piece.begin_elems, element_bytes_)};
      void* outputs[] = {sum};
      Collective part{.op = OpKind::kReduce,
                      .dtype = call_.dtype,
                      .reduction = undivided(call_.reduction),
                      .root = peer_table_.local_rank_of(representative),
                      .num_elems = piece.num_elems,
                      .inputs = inputs,
                      .outputs = outputs};
      run_local(part);
      if (!is_representative) continue;
      const bool is_root = root_host < 0 || rank_ == call_.root;
      inputs[0] = sum;
      outputs[0] = is_root ? at(call_.outputs[0], piece.begin_elems, element_bytes_) : nullptr;
      part.root = root_host;
      MessageShares shares = MessageShares::of_whole(part, host_, num_hosts());
      shares.divisor = divisor_of(call_, world_size_);
      messages_.among(ranks,
                      [&] { count_sent(reduce_directly(messages_, header_, shares, root_host)); });
    }
  }

  void broadcast() {
    barrier();
    const std::vector<int> ranks = representatives(call_.root);
    const int representative = ranks[static_cast<std::size_t>(host_)];
    if (rank_ == representative) {
      Collective between = call_;
      between.root = peer_table_.host_of(call_.root);
      CallHeader header = header_;
      header.root = between.root;
      plan_message_collective(num_hosts(), between, options_, header);
      messages_.among(ranks,
                      [&] { count_sent(run_message_collective(messages_, between, header)); });
    }
    broadcast_inside(peer_table_.local_rank_of(representative),
                     rank_ == call_.root ? call_.inputs[0] : call_.outputs[0]);
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

  // gather, scatter and all_to_all.
  void move() {
    if (call_.root >= 0) barrier();
    MessageExchange exchange(messages_, header_);
    for (const int host : other_hosts_)
      for (const int rank : peer_table_.ranks_on(host)) count_sent(exchange.send_part(call_, rank));
    for (const int host : other_hosts_)
      for (const int rank : peer_table_.ranks_on(host)) exchange.recv_part(call_, rank);
    if (call_.root < 0 || peer_table_.host_of(call_.root) == host_) move_inside();
    exchange.finish();
  }

  // The call as this host's ranks see it: the others' shares left out.
  void move_inside() {
    Collective local = call_;
    if (call_.root >= 0) local.root = peer_table_.local_rank_of(call_.root);
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    std::vector<std::size_t> input_elems, output_elems;
    for (const int peer : local_ranks_) {
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
    const bool is_root = rank_ == call_.root;
    const bool is_all = call_.op == OpKind::kAllToAll;
    local.input_elems =
        is_all || (is_root && call_.op == OpKind::kScatter) ? input_elems.data() : nullptr;
    local.output_elems =
        is_all || (is_root && call_.op == OpKind::kGather) ? output_elems.data() : nullptr;
    run_local(local);
  }

  // ---- By all ranks: each chunk crosses the network once per host.

  // The elements of a piece of all chunks. Two pieces are staged at the same time.
  std::size_t piece_elems(const MessageShares& shares) const {
    return std::clamp<std::size_t>(
        kStagingBytes / (2 * static_cast<std::size_t>(world_size_) * element_bytes_), 1,
        std::max<std::size_t>(1, shares.max_elems()));
  }

  // Calls post(exchange, k) for all pieces in order, and complete(exchange, k) once piece k + 1 is
  // posted: messages are on their way while this host's ranks work on another piece.
  template <class Post, class Complete>
  void in_pieces(const MessageShares& shares, const Post& post, const Complete& complete) {
    // One at least, because headers are exchanged even without data.
    const std::size_t num_pieces =
        std::max<std::size_t>(1, num_slices(shares.max_elems(), piece_elems(shares)));
    MessageExchange exchanges[] = {{messages_, header_}, {messages_, header_}};
    for (std::size_t idx = 0; idx <= num_pieces; ++idx) {
      if (idx < num_pieces) post(exchanges[idx % 2], idx);
      if (idx > 0) complete(exchanges[(idx - 1) % 2], idx - 1);
    }
  }

  // Leaves this rank's chunk, reduced over all ranks, in its output. The ranks of a host reduce
  // what they have for each rank, its courier sends that, and the owner adds up the hosts in their
  // order: one rounding inside a host, and one between them.
  void reduce_scatter(const MessageShares& shares) {
    const std::size_t max_elems = piece_elems(shares);
    const std::size_t max_bytes = max_elems * element_bytes_;
    struct Staging {
      std::vector<std::byte*> received;  // by host
      std::vector<std::byte*> partials;  // by round
    } halves[2];
    for (Staging& half : halves) {
      half.received.resize(static_cast<std::size_t>(num_hosts()));
      for (const int host : other_hosts_)
        half.received[static_cast<std::size_t>(host)] = messages_.stage(max_bytes);
      for (std::size_t round = 0; round < rounds_.size(); ++round)
        half.partials.push_back(messages_.stage(max_bytes));
    }
    const auto post = [&](MessageExchange& exchange, std::size_t idx) {
      const Staging& half = halves[idx % 2];
      for (const int host : other_hosts_)
        exchange.recv(courier_of(rank_, host), half.received[static_cast<std::size_t>(host)],
                      shares.slice(rank_, idx, max_elems).num_elems * element_bytes_);
      for (std::size_t round = 0; round < rounds_.size(); ++round) {
        run_for(OpKind::kReduceScatter, rounds_[round], shares, idx, half.partials[round]);
        const int owner = rounds_[round][static_cast<std::size_t>(local_rank_)];
        if (owner < 0) continue;
        const std::size_t num_bytes =
            shares.slice(owner, idx, max_elems).num_elems * element_bytes_;
        exchange.send(owner, half.partials[round], num_bytes);
        count_sent(num_bytes);
      }
    };
    const auto complete = [&](MessageExchange& exchange, std::size_t idx) {
      const ElemRange own = shares.slice(rank_, idx, max_elems);
      std::byte* output = shares.output(rank_, own);
      run_for(OpKind::kReduceScatter, local_ranks_, shares, idx, output);
      exchange.finish();
      if (own.num_elems == 0) return;
      const auto& received = halves[idx % 2].received;
      std::vector<const void*> sources(received.begin(), received.end());
      sources[static_cast<std::size_t>(host_)] = output;
      shares.op->combine(output, nullptr, sources.data(), num_hosts(), own.num_elems,
                         shares.divisor);
    };
    in_pieces(shares, post, complete);
  }

  // A collective of piece `idx` of the owners' chunks, one for each rank of this host: each rank
  // reduces its owner's into `to`, or all copy all.
  void run_for(OpKind op, const std::vector<int>& owners, const MessageShares& shares,
               std::size_t idx, std::byte* to) {
    const bool reduces = op == OpKind::kReduceScatter;
    std::vector<void*> parts;
    std::vector<std::size_t> elems;
    for (const int owner : owners) {
      const ElemRange part =
          owner < 0 ? ElemRange{} : shares.slice(owner, idx, piece_elems(shares));
      parts.push_back(owner < 0 ? nullptr
                      : reduces ? const_cast<std::byte*>(shares.input(owner, part))
                                : shares.output(owner, part));
      elems.push_back(part.num_elems);
    }
    if (std::all_of(elems.begin(), elems.end(), [](std::size_t n) { return n == 0; })) return;
    const auto own = static_cast<std::size_t>(local_rank_);
    const void* input[] = {parts[own]};
    void* output[] = {to};
    run_local({.op = op,
               .dtype = call_.dtype,
               .reduction = undivided(call_.reduction),
               .num_elems = elems[own],
               .inputs = reduces ? parts.data() : input,
               .outputs = reduces ? output : parts.data(),
               .input_elems = reduces ? elems.data() : nullptr,
               .output_elems = reduces ? nullptr : elems.data()});
  }

  // Every rank's chunk is in its own output before, and in all ranks' after. A rank sends its chunk
  // to its courier on each other host, and the ranks there copy it.
  void all_gather(const MessageShares& shares) {
    const std::size_t max_elems = piece_elems(shares);
    const auto post = [&](MessageExchange& exchange, std::size_t idx) {
      const ElemRange own = shares.slice(rank_, idx, max_elems);
      for (const auto& owners : rounds_) {
        const int owner = owners[static_cast<std::size_t>(local_rank_)];
        if (owner < 0) continue;
        const ElemRange theirs = shares.slice(owner, idx, max_elems);
        exchange.recv(owner, shares.output(owner, theirs), theirs.num_elems * element_bytes_);
      }
      for (const int host : other_hosts_) {
        exchange.send(courier_of(rank_, host), shares.output(rank_, own),
                      own.num_elems * element_bytes_);
        count_sent(own.num_elems * element_bytes_);
      }
      run_for(OpKind::kAllGather, local_ranks_, shares, idx, nullptr);
    };
    const auto complete = [&](MessageExchange& exchange, std::size_t idx) {
      exchange.finish();
      for (const auto& owners : rounds_) run_for(OpKind::kAllGather, owners, shares, idx, nullptr);
    };
    in_pieces(shares, post, complete);
  }

  // ---- Inside this host.

  // Runs a collective of this host's ranks as a part of the current one; `call` numbers them from
  // 0. Throws Stopped and Mismatched with the group's numbers. Counts the bytes if `is_data`.
  void run_local(const Collective& call, bool is_data = true) {
    if (local_ == nullptr) return run_alone(call);
    CallHeader header{.seq = header_.seq,
                      .num_elems = call.num_elems,
                      .root = call.root,
                      .op = call.op,
                      .dtype = call.dtype,
                      .reduction = call.reduction,
                      .is_uneven = call.is_uneven(local_size()),
                      .element_name = call.element_name};
    local_->plan(call, header);
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline_ - std::chrono::steady_clock::now());
    const WaitLimits limits{
        .timeout = std::clamp(left, std::chrono::milliseconds(1), limits_.timeout),
        .is_interrupted = limits_.is_interrupted};
    const trace::Span traced([&] {
      return trace::Event{.num_bytes = call.num_bytes(),
                          .kind = trace::Kind::kPart,
                          .name = trace::name_number(name_of(call.op)),
                          .algorithm = trace::name_number(name_of(header.algorithm))};
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

  // On a host with one rank every output is its input; a broadcast needs no copy.
  void run_alone(const Collective& call) const {
    if (call.op == OpKind::kBarrier || call.op == OpKind::kBroadcast) return;
    const std::size_t num_bytes = call.input_share(0) * element_bytes(call.dtype);
    if (num_bytes > 0 && call.inputs[0] != call.outputs[0])
      std::memcpy(call.outputs[0], call.inputs[0], num_bytes);
  }

  const PeerTable& peer_table_;
  Carrier* local_;
  MessageEngine& messages_;
  const CommunicatorOptions& options_;
  const Collective& call_;
  const CallHeader& header_;
  const WaitLimits& limits_;
  std::chrono::steady_clock::time_point deadline_;
  int rank_;
  int world_size_;
  int host_;
  int local_rank_;
  const std::vector<int>& local_ranks_;  // of this host, by local rank
  std::vector<int> other_hosts_;
  std::vector<std::vector<int>> rounds_;
  std::size_t element_bytes_;
  Traffic traffic_;
};

}  // namespace

Traffic run_by_hosts(const HostsGroup& group, const Collective& call, const CallHeader& header,
                     const WaitLimits& limits) {
  return HostsCollective(group, call, header, limits).run();
}

}  // namespace ringcomm
