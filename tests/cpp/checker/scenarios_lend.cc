#include <memory>

#include "checker_arch.h"
#include "core/board_protocol.h"
#include "scenarios.h"

namespace ringcomm::checker {
namespace {

/// Lent buffers: each rank sums its own block of all buffers into all of them. Only the boards'
/// cursors order a call and the next one, which fills the buffers again.
struct Lending {
  int num_ranks;
  int num_calls;

  BoardGeometry geometry;
  std::vector<std::byte*> inputs;   ///< per rank: a buffer's worth for each call
  std::vector<std::byte*> outputs;  ///< per rank: the same
  std::vector<std::byte*> lent;     ///< per rank: its buffer, a block for each rank

  std::size_t buffer_bytes() const { return static_cast<std::size_t>(num_ranks) * kBlockBytes; }
  std::byte* block(int rank, int block_idx) const { return lent[rank] + block_idx * kBlockBytes; }
  std::uint64_t value(int rank, int call, int block_idx) const {
    return input_of(rank, static_cast<std::size_t>(call * num_ranks + block_idx));
  }

  void lay_out(Memory& memory) {
    geometry = lay_out_boards(memory, num_ranks, 1);
    inputs.clear();
    outputs.clear();
    lent.clear();
    for (int rank = 0; rank < num_ranks; ++rank) {
      lent.push_back(memory.add_shared(num_ranks, "lent by " + std::to_string(rank)));
      inputs.push_back(memory.add_private(rank, num_calls * num_ranks, "input"));
      outputs.push_back(memory.add_private(rank, num_calls * num_ranks, "output"));
      for (int i = 0; i < num_calls * num_ranks; ++i)
        memory.poke(inputs[rank] + i * kBlockBytes, value(rank, 0, i));
    }
  }

  std::string check(const Memory& memory, int rank) const {
    for (int i = 0; i < num_calls * num_ranks; ++i) {
      std::uint64_t sum = 0;
      for (int peer = 0; peer < num_ranks; ++peer) sum += value(peer, 0, i);
      const std::string fault = compare(memory, outputs[rank] + i * kBlockBytes, sum);
      if (!fault.empty()) return fault;
    }
    return {};
  }
};

void sum_own_block(CheckerArch& arch, const Lending& lending, int rank) {
  std::byte* own = lending.block(rank, rank);
  const int next = (rank + 1) % lending.num_ranks;
  std::byte* of_next = lending.block(next, rank);
  if (lending.num_ranks == 2) return arch.combine(own, of_next, own, of_next, kBlockBytes);
  for (int distance = 1; distance < lending.num_ranks; ++distance)
    arch.combine(own, nullptr, own, lending.block((rank + distance) % lending.num_ranks, rank),
                 kBlockBytes);
  for (int distance = 1; distance < lending.num_ranks; ++distance)
    arch.copy(lending.block((rank + distance) % lending.num_ranks, rank), own, kBlockBytes);
}

WaitStatus run_calls(CheckerArch& arch, const Lending& lending, int rank) {
  Board<CheckerArch> board(arch, lending.geometry, rank);
  std::uint64_t step = 0;
  for (int call = 0; call < lending.num_calls; ++call) {
    const std::size_t offset = static_cast<std::size_t>(call) * lending.buffer_bytes();
    arch.checkpoint(step++);
    arch.copy(lending.lent[rank], lending.inputs[rank] + offset, lending.buffer_bytes());
    board.publish();
    for (int peer = 0; peer < lending.num_ranks; ++peer) {
      arch.checkpoint(step++);
      const std::byte* unused = nullptr;
      if (peer == rank) continue;
      if (const WaitStatus stop = board.wait(peer, unused); stop != WaitStatus::kNone) return stop;
    }
    sum_own_block(arch, lending, rank);
    arch.checkpoint(step++);
    if (const WaitStatus stop = board.rejoin(); stop != WaitStatus::kNone) return stop;
    arch.copy(lending.outputs[rank] + offset, lending.lent[rank], lending.buffer_bytes());
  }
  return WaitStatus::kNone;
}

Scenario lend(std::string name, int num_ranks, int num_calls, bool has_death,
              bool steps_on_payload) {
  auto shape = std::make_shared<Lending>();
  shape->num_ranks = num_ranks;
  shape->num_calls = num_calls;
  Scenario scenario;
  scenario.name = std::move(name);
  scenario.text = "lent buffers, " + std::to_string(num_ranks) + " ranks, " +
                  std::to_string(num_calls) + " calls";
  scenario.num_ranks = num_ranks;
  scenario.has_death = has_death;
  scenario.steps_on_payload = steps_on_payload;
  scenario.setup = [shape](Memory& memory) { shape->lay_out(memory); };
  scenario.body = [shape](CheckerArch& arch, int rank) { return run_calls(arch, *shape, rank); };
  scenario.check = [shape](const Memory& memory, int rank) { return shape->check(memory, rank); };
  return scenario;
}

}  // namespace

std::vector<Scenario> lend_scenarios() {
  return {
      lend("lend2", 2, 2, false, true),
      lend("lend2_death", 2, 2, true, true),
      lend("lend3", 3, 1, false, false),
  };
}

}  // namespace ringcomm::checker
