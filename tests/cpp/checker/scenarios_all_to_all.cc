#include <array>

#include "checker_arch.h"
#include "core/board_protocol.h"
#include "core/chunk_layout.h"
#include "core/wait_policy.h"
#include "scenarios.h"

namespace ringcomm::checker {
namespace {

/// Shards of different sizes, as Alltoallv moves them: a rank knows its own sizes until the
/// first phase tells it the others', and all must go through one number of phases.
struct Exchange {
  int num_ranks;
  bool is_in_place;
  std::array<std::array<int, 3>, 3> sizes;  ///< in blocks, by sender and receiver

  BoardGeometry geometry = {};
  std::vector<std::byte*> tables = {};                ///< per rank: its sizes in one block
  std::vector<std::byte*> seen = {};                  ///< per rank: room for a peer's table
  std::vector<std::vector<std::byte*>> inputs = {};   ///< by sender and receiver
  std::vector<std::vector<std::byte*>> outputs = {};  ///< by receiver and sender
  std::vector<std::vector<std::byte*>> kept = {};     ///< as inputs

  /// Of data, in a region; the layout wants more than there are ranks.
  std::size_t room_blocks() const { return static_cast<std::size_t>(num_ranks) + 1; }
  std::uint64_t value(int from, int to, int block_idx) const {
    return input_of(from, static_cast<std::size_t>(16 * to + block_idx));
  }
  std::size_t size(int from, int to) const { return static_cast<std::size_t>(sizes[from][to]); }

  void lay_out(Memory& memory) {
    const int region_blocks = 1 + static_cast<int>(room_blocks());
    geometry = lay_out_boards(memory, num_ranks, region_blocks);
    tables.clear();
    seen.clear();
    for (auto* buffers : {&inputs, &outputs, &kept})
      buffers->assign(num_ranks, std::vector<std::byte*>(num_ranks));
    for (int rank = 0; rank < num_ranks; ++rank) {
      memory.own_as_board(geometry.region(rank, 0), region_blocks, &geometry.cursor(0, 0, 0), rank,
                          false);
      tables.push_back(memory.add_private(rank, 1, "sizes"));
      seen.push_back(memory.add_private(rank, 1, "sizes seen"));
      std::uint64_t table = 0;
      for (int peer = 0; peer < num_ranks; ++peer) {
        table |= static_cast<std::uint64_t>(sizes[rank][peer]) << (8 * peer);
        if (peer == rank) continue;
        const int longer = std::max(sizes[rank][peer], sizes[peer][rank]);
        inputs[rank][peer] = memory.add_private(rank, longer, "buffer");
        outputs[rank][peer] =
            is_in_place ? inputs[rank][peer] : memory.add_private(rank, longer, "output");
        if (is_in_place) kept[rank][peer] = memory.add_private(rank, longer, "kept");
        for (int i = 0; i < sizes[rank][peer]; ++i)
          memory.poke(inputs[rank][peer] + i * kBlockBytes, value(rank, peer, i));
      }
      memory.poke(tables[rank], table);
    }
  }

  std::string check(const Memory& memory, int rank) const {
    for (int from = 0; from < num_ranks; ++from)
      for (int i = 0; from != rank && i < sizes[from][rank]; ++i) {
        const std::string fault =
            compare(memory, outputs[rank][from] + i * kBlockBytes, value(from, rank, i));
        if (!fault.empty()) return fault;
      }
    return {};
  }
};

/// One call of one rank.
class RankExchange {
 public:
  RankExchange(CheckerArch& arch, const Exchange& exchange, int rank)
      : arch_(arch), exchange_(exchange), rank_(rank), board_(arch, exchange.geometry, rank) {
    layout_.learn(rank, [&](int to) { return exchange.size(rank, to); });
  }

  WaitStatus run() {
    std::size_t num_phases = 1;
    for (std::size_t piece_idx = 0; piece_idx < num_phases; ++piece_idx) {
      arch_.checkpoint(piece_idx);
      if (const WaitStatus stop = stage(piece_idx); stop != WaitStatus::kNone) return stop;
      board_.publish();
      if (piece_idx == 0) {
        if (const WaitStatus stop = learn_sizes(); stop != WaitStatus::kNone) return stop;
        num_phases = layout_.num_phases();
        keep_inputs();
      }
      if (const WaitStatus stop = take(piece_idx); stop != WaitStatus::kNone) return stop;
    }
    return WaitStatus::kNone;
  }

 private:
  const std::byte* input(int to) const {
    return (is_kept_[to] ? exchange_.kept : exchange_.inputs)[rank_][to];
  }

  WaitStatus stage(std::size_t piece_idx) {
    std::byte* place = nullptr;
    std::size_t offset = 0;
    for (int to = 0; to < exchange_.num_ranks; ++to) {
      const std::size_t shard = exchange_.size(rank_, to);
      const ElemRange part = layout_.slice(rank_, shard, piece_idx);
      const bool has_part = layout_.is_staged(rank_, to) && part.num_elems > 0;
      if (place == nullptr && (has_part || piece_idx == 0)) {
        if (const WaitStatus stop = board_.open(place); stop != WaitStatus::kNone) return stop;
        if (piece_idx == 0) {
          arch_.copy(place, exchange_.tables[rank_], kBlockBytes);
          place += kBlockBytes;
        }
      }
      if (has_part)
        arch_.copy(place + offset * kBlockBytes, input(to) + part.begin_elems * kBlockBytes,
                   part.num_elems * kBlockBytes);
      if (layout_.is_staged(rank_, to)) offset += layout_.slice_elems(rank_, shard);
    }
    return WaitStatus::kNone;
  }

  WaitStatus learn_sizes() {
    for (int from = 0; from < exchange_.num_ranks; ++from) {
      if (from == rank_) continue;
      const std::byte* region = nullptr;
      if (const WaitStatus stop = board_.wait(from, region); stop != WaitStatus::kNone) return stop;
      arch_.copy(exchange_.seen[rank_], region, kBlockBytes);
      const std::uint64_t table = arch_.value_of(exchange_.seen[rank_]);
      layout_.learn(from, [&](int to) { return table >> (8 * to) & 0xff; });
    }
    return WaitStatus::kNone;
  }

  void keep_inputs() {
    for (int peer = 0; peer < exchange_.num_ranks; ++peer) {
      if (peer == rank_ || !exchange_.is_in_place ||
          !layout_.overwrites(peer, exchange_.size(rank_, peer)))
        continue;
      arch_.copy(exchange_.kept[rank_][peer], input(peer),
                 exchange_.size(rank_, peer) * kBlockBytes);
      is_kept_[peer] = true;
    }
  }

  WaitStatus take(std::size_t piece_idx) {
    for (int distance = 1; distance < exchange_.num_ranks; ++distance) {
      const int from = (rank_ + distance) % exchange_.num_ranks;
      const ElemRange part = layout_.slice(from, exchange_.size(from, rank_), piece_idx);
      if (part.num_elems == 0) continue;
      const std::byte* region = nullptr;
      if (const WaitStatus stop = board_.wait(from, region); stop != WaitStatus::kNone) return stop;
      const std::size_t skipped = (piece_idx == 0 ? 1 : 0) + senders_[from].offset_elems;
      arch_.copy(exchange_.outputs[rank_][from] + part.begin_elems * kBlockBytes,
                 region + skipped * kBlockBytes, part.num_elems * kBlockBytes);
    }
    return WaitStatus::kNone;
  }

  CheckerArch& arch_;
  const Exchange& exchange_;
  int rank_;
  Board<CheckerArch> board_;
  ShardLayout::Sender senders_[kMaxRanks] = {};
  bool is_kept_[kMaxRanks] = {};
  ShardLayout layout_{ShardLayout::Kind::kToEach, rank_, exchange_.num_ranks,
                      exchange_.room_blocks(), senders_};
};

Scenario shards(std::string name, int num_ranks, bool is_in_place,
                std::array<std::array<int, 3>, 3> sizes, bool has_death = false) {
  const std::string text =
      "uneven shards, " + std::to_string(num_ranks) + " ranks" + (is_in_place ? ", in place" : "");
  const Exchange shape{.num_ranks = num_ranks, .is_in_place = is_in_place, .sizes = sizes};
  const auto body = [](CheckerArch& arch, const Exchange& exchange, int rank) {
    return RankExchange(arch, exchange, rank).run();
  };
  Scenario scenario = scenario_of(std::move(name), text, num_ranks, shape, body);
  scenario.has_death = has_death;
  scenario.steps_on_payload = num_ranks == 2;
  return scenario;
}

/// An all_to_all over several hosts, as messages and as a barrier inside each host: who waits for
/// whom. As over Gloo a send ends with its receive. The receive of a long message is posted when
/// its envelope has come, in finish(); that of a short one with the envelope's.
struct Hosts {
  std::string placement;  ///< the host of each rank, as a letter
  bool is_long;

  std::vector<std::vector<Cursor*>> sent = {};      ///< by sender and receiver; null inside a host
  std::vector<std::vector<Cursor*>> received = {};  ///< likewise: the receive is posted
  std::vector<Cursor*> entered = {};                ///< by rank: the part inside the host
  std::vector<std::vector<std::byte*>> taken = {};  ///< by receiver and sender: 1 once it has come
  std::vector<std::byte*> ones = {};                ///< by rank

  int num_ranks() const { return static_cast<int>(placement.size()); }
  bool is_elsewhere(int rank, int peer) const { return placement[rank] != placement[peer]; }

  void lay_out(Memory& memory) {
    const auto num = static_cast<std::size_t>(num_ranks());
    for (auto* table : {&sent, &received}) table->assign(num, std::vector<Cursor*>(num));
    taken.assign(num, std::vector<std::byte*>(num));
    entered.clear();
    ones.clear();
    for (int from = 0; from < num_ranks(); ++from) {
      for (int to = 0; to < num_ranks(); ++to) {
        if (!is_elsewhere(from, to)) continue;
        const std::string pair = std::to_string(from) + ">" + std::to_string(to);
        sent[from][to] = memory.add_cursors(1, {"sent " + pair});
        received[from][to] = memory.add_cursors(1, {"receive " + pair});
        taken[to][from] = memory.add_private(to, 1, "taken " + pair);
        memory.poke(taken[to][from], 0);
      }
      entered.push_back(memory.add_cursors(1, {"inside " + std::to_string(from)}));
      ones.push_back(memory.add_private(from, 1, "one"));
      memory.poke(ones.back(), 1);
    }
  }

  std::string check(const Memory& memory, int rank) const {
    for (int from = 0; from < num_ranks(); ++from) {
      if (!is_elsewhere(rank, from)) continue;
      const std::string fault = compare(memory, taken[rank][from], 1);
      if (!fault.empty()) return fault;
    }
    return {};
  }
};

/// One call of one rank.
class HostRank {
 public:
  HostRank(CheckerArch& arch, const Hosts& hosts, int rank)
      : arch_(arch), hosts_(hosts), rank_(rank) {}

  WaitStatus run() {
    move_over_hosts(
        rank_, hosts_.num_ranks(), true, [&] { inside(); }, [&] { return must_finish_; },
        [&](int to, int from) { move(to, from); }, [&] { finish(); });
    return WaitStatus::kNone;
  }

 private:
  void wait(Cursor& cursor, int peer) {
    const WaitStatus stop = wait_at_least(arch_, cursor, 1, peer);
    arch_.require(stop == WaitStatus::kNone, ViolationKind::kBadStop,
                  "a wait ends without a reason");
  }

  void inside() {
    advance(arch_, *hosts_.entered[rank_], 1);
    for (int peer = 0; peer < hosts_.num_ranks(); ++peer)
      if (peer != rank_ && !hosts_.is_elsewhere(rank_, peer)) wait(*hosts_.entered[peer], peer);
  }

  void move(int to, int from) {
    must_finish_ = hosts_.is_long && hosts_.is_elsewhere(rank_, to);
    if (hosts_.is_elsewhere(rank_, to)) {
      advance(arch_, *hosts_.sent[rank_][to], 1);
      outgoing_[num_outgoing_++] = to;
    }
    if (hosts_.is_elsewhere(rank_, from)) {
      if (!hosts_.is_long) advance(arch_, *hosts_.received[from][rank_], 1);
      incoming_[num_incoming_++] = from;
    }
  }

  void finish() {
    for (int i = 0; i < num_incoming_; ++i) {
      const int from = incoming_[i];
      wait(*hosts_.sent[from][rank_], from);
      if (hosts_.is_long) advance(arch_, *hosts_.received[from][rank_], 1);
      arch_.copy(hosts_.taken[rank_][from], hosts_.ones[rank_], kBlockBytes);
    }
    for (int i = 0; i < num_outgoing_; ++i)
      wait(*hosts_.received[rank_][outgoing_[i]], outgoing_[i]);
    num_incoming_ = num_outgoing_ = 0;
  }

  CheckerArch& arch_;
  const Hosts& hosts_;
  int rank_;
  bool must_finish_ = false;
  std::array<int, kMaxRanks> incoming_{}, outgoing_{};
  int num_incoming_ = 0, num_outgoing_ = 0;
};

Scenario hosts(std::string name, std::string placement, bool is_long) {
  const std::string text = "all_to_all over hosts, ranks on " + placement +
                           (is_long ? ", long messages" : ", short messages");
  const Hosts shape{.placement = std::move(placement), .is_long = is_long};
  const auto body = [](CheckerArch& arch, const Hosts& hosts, int rank) {
    return HostRank(arch, hosts, rank).run();
  };
  return scenario_of(std::move(name), text, shape.num_ranks(), shape, body);
}

}  // namespace

std::vector<Scenario> all_to_all_scenarios() {
  return {
      // One piece on one rank, several on the other.
      shards("shards2", 2, false, {{{0, 4}, {2, 0}}}),
      shards("shards2_in_place", 2, true, {{{0, 4}, {2, 0}}}),
      shards("shards2_death", 2, true, {{{0, 3}, {1, 0}}}, true),
      shards("shards3", 3, false, {{{0, 3, 2}, {2, 0, 0}, {0, 2, 0}}}),
      shards("shards3_in_place", 3, true, {{{0, 3, 2}, {2, 0, 0}, {0, 2, 0}}}),
      hosts("hosts_aab", "aab", true),
      hosts("hosts_aaab", "aaab", true),
      hosts("hosts_aaba", "aaba", true),
      hosts("hosts_aaab_short", "aaab", false),
  };
}

}  // namespace ringcomm::checker
