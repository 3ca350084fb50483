#include <array>
#include <memory>

#include "checker_arch.h"
#include "core/chunk_layout.h"
#include "core/wait_policy.h"
#include "scenarios.h"

namespace ringcomm::checker {
namespace {

/// An all_to_all over several hosts, as messages and as a barrier inside each host: who waits for
/// whom. As over Gloo a send ends with its receive. The receive of a long message is posted when
/// its envelope has come, in finish(); that of a short one with the envelope's.
struct Hosts {
  std::string placement;  ///< the host of each rank, as a letter
  bool is_long;

  std::vector<std::vector<Cursor*>> sent;      ///< by sender and receiver; null inside a host
  std::vector<std::vector<Cursor*>> received;  ///< likewise: the receive is posted
  std::vector<Cursor*> entered;                ///< by rank: the part inside the host
  std::vector<std::vector<std::byte*>> taken;  ///< by receiver and sender: 1 once it has come

  int num_ranks() const { return static_cast<int>(placement.size()); }
  bool is_elsewhere(int rank, int peer) const { return placement[rank] != placement[peer]; }

  void lay_out(Memory& memory) {
    const auto num = static_cast<std::size_t>(num_ranks());
    for (auto* table : {&sent, &received}) table->assign(num, std::vector<Cursor*>(num));
    taken.assign(num, std::vector<std::byte*>(num));
    entered.clear();
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
  HostRank(CheckerArch& arch, const Hosts& hosts, std::byte* one, int rank)
      : arch_(arch), hosts_(hosts), one_(one), rank_(rank) {}

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
      arch_.copy(hosts_.taken[rank_][from], one_, kBlockBytes);
    }
    for (int i = 0; i < num_outgoing_; ++i)
      wait(*hosts_.received[rank_][outgoing_[i]], outgoing_[i]);
    num_incoming_ = num_outgoing_ = 0;
  }

  CheckerArch& arch_;
  const Hosts& hosts_;
  std::byte* one_;
  int rank_;
  bool must_finish_ = false;
  std::array<int, kMaxRanks> incoming_{}, outgoing_{};
  int num_incoming_ = 0, num_outgoing_ = 0;
};

Scenario hosts(std::string name, std::string placement, bool is_long) {
  auto shape = std::make_shared<Hosts>();
  auto ones = std::make_shared<std::vector<std::byte*>>();
  shape->placement = std::move(placement);
  shape->is_long = is_long;
  Scenario scenario;
  scenario.name = std::move(name);
  scenario.text = std::string("all_to_all over hosts, ranks on ") + shape->placement +
                  (is_long ? ", long messages" : ", short messages");
  scenario.num_ranks = shape->num_ranks();
  scenario.setup = [shape, ones](Memory& memory) {
    shape->lay_out(memory);
    ones->clear();
    for (int rank = 0; rank < shape->num_ranks(); ++rank) {
      ones->push_back(memory.add_private(rank, 1, "one"));
      memory.poke(ones->back(), 1);
    }
  };
  scenario.body = [shape, ones](CheckerArch& arch, int rank) {
    return HostRank(arch, *shape, (*ones)[static_cast<std::size_t>(rank)], rank).run();
  };
  scenario.check = [shape](const Memory& memory, int rank) { return shape->check(memory, rank); };
  return scenario;
}

}  // namespace

std::vector<Scenario> host_scenarios() {
  return {
      hosts("hosts_aab", "aab", true),
      hosts("hosts_aaab", "aaab", true),
      hosts("hosts_aaba", "aaba", true),
      hosts("hosts_aaab_short", "aaab", false),
  };
}

}  // namespace ringcomm::checker
