#include "checker_arch.h"
#include "core/board_protocol.h"
#include "scenarios.h"

namespace ringcomm::checker {
namespace {

/// Boards of which each rank has cursors of its own, as a GPU's.
struct CopiesGeometry : BoardGeometry {
  static constexpr bool kHasCopies = true;
  Cursor& cursor(int reader, int writer, std::uint64_t) const {
    return reinterpret_cast<Cursor*>(cursors)[reader * world_size + writer];
  }
};

/// Phases of boards: the ranks that write in each; all others read.
struct Phases {
  enum class Writers { kAll, kFirst, kInTurn };

  int num_ranks;
  int num_phases;
  Writers writers;
  int region_blocks = 1;
  bool has_copies = false;
  bool is_payload = false;  ///< beside the cursors, and writes no region

  CopiesGeometry geometry;
  std::vector<std::byte*> inputs;   ///< per rank: one region's worth for each phase
  std::vector<std::byte*> outputs;  ///< per rank: what each peer wrote in each phase

  bool writes(int rank, int phase) const {
    switch (writers) {
      case Writers::kAll:
        return true;
      case Writers::kFirst:
        return rank == 0;
      case Writers::kInTurn:
        return rank == phase % num_ranks;
    }
    return false;
  }
  std::size_t region_bytes() const { return static_cast<std::size_t>(region_blocks) * kBlockBytes; }
  std::byte* input(int rank, int phase) const { return inputs[rank] + phase * region_bytes(); }
  std::byte* output(int rank, int phase, int peer) const {
    return outputs[rank] + (phase * num_ranks + peer) * region_bytes();
  }
  std::uint64_t value(int rank, int phase, int block_idx) const {
    return input_of(rank, static_cast<std::size_t>(phase * region_blocks + block_idx));
  }

  void lay_out(Memory& memory) {
    std::vector<std::string> names;
    // By reader and writer, or by writer and the phase's parity.
    for (int i = 0; i < num_ranks; ++i)
      for (int j = 0; j < (has_copies ? num_ranks : 2); ++j)
        names.push_back(has_copies
                            ? "published " + std::to_string(j) + " to " + std::to_string(i)
                            : "published " + std::to_string(i) + (j == 0 ? ", even" : ", odd"));
    Cursor* published = memory.add_cursors(static_cast<int>(names.size()), names);
    if (is_payload) memory.add_payload(published, 2 * num_ranks, "payload");
    geometry = {{.world_size = num_ranks,
                 .cursors = reinterpret_cast<std::byte*>(published),
                 .regions = memory.add_shared(2 * num_ranks * region_blocks, "regions"),
                 .region_stride_bytes = region_bytes(),
                 .region_bytes = region_bytes()}};
    inputs.clear();
    outputs.clear();
    for (int rank = 0; rank < num_ranks; ++rank) {
      std::byte* const first = is_payload ? published[2 * rank].payload : geometry.region(rank, 0);
      memory.own_as_board(first, region_blocks, published, rank, has_copies);
      inputs.push_back(memory.add_private(rank, num_phases * region_blocks, "input"));
      outputs.push_back(memory.add_private(rank, num_phases * num_ranks * region_blocks, "output"));
      for (int i = 0; i < num_phases * region_blocks; ++i) {
        memory.poke(inputs[rank] + i * kBlockBytes, value(rank, 0, i));
      }
    }
  }

  std::string check(const Memory& memory, int rank) const {
    for (int phase = 0; phase < num_phases; ++phase) {
      for (int peer = 0; peer < num_ranks; ++peer) {
        for (int i = 0; peer != rank && writes(peer, phase) && i < region_blocks; ++i) {
          const std::string fault =
              compare(memory, output(rank, phase, peer) + i * kBlockBytes, value(peer, phase, i));
          if (!fault.empty()) return fault;
        }
      }
    }
    return {};
  }
};

template <class Geometry>
WaitStatus run_phases(CheckerArch& arch, const Phases& phases, const Geometry& geometry, int rank) {
  Board<CheckerArch, Geometry> board(arch, geometry, rank);
  const std::uint64_t steps_per_phase = 8;
  for (int phase = 0; phase < phases.num_phases; ++phase) {
    std::uint64_t step = static_cast<std::uint64_t>(phase) * steps_per_phase;
    arch.checkpoint(step++);
    if (phases.writes(rank, phase)) {
      std::byte* region = nullptr;
      if (const WaitStatus stop = board.open(region); stop != WaitStatus::kNone) return stop;
      arch.copy(phases.is_payload ? board.payload(rank) : region, phases.input(rank, phase),
                board.region_bytes());
    }
    board.publish();
    for (int peer = 0; peer < phases.num_ranks; ++peer) {
      arch.checkpoint(step++);
      if (peer == rank || !phases.writes(peer, phase)) continue;
      const std::byte* region = nullptr;
      if (const WaitStatus stop = board.wait(peer, region); stop != WaitStatus::kNone) return stop;
      arch.copy(phases.output(rank, phase, peer), phases.is_payload ? board.payload(peer) : region,
                board.region_bytes());
    }
  }
  return WaitStatus::kNone;
}

Scenario board(std::string name, const Phases& shape, bool has_death, bool steps_on_payload) {
  const char* writers = shape.writers == Phases::Writers::kAll     ? "all write"
                        : shape.writers == Phases::Writers::kFirst ? "rank 0 writes"
                                                                   : "one writes in turn";
  const char* kind = shape.has_copies   ? ", cursors for each reader"
                     : shape.is_payload ? " beside their cursors"
                                        : "";
  const std::string text = "boards, " + std::to_string(shape.num_ranks) + " ranks, " +
                           std::to_string(shape.num_phases) + " phases, " + writers + kind;
  const auto body = [](CheckerArch& arch, const Phases& phases, int rank) {
    return phases.has_copies ? run_phases(arch, phases, phases.geometry, rank)
                             : run_phases<BoardGeometry>(arch, phases, phases.geometry, rank);
  };
  Scenario scenario = scenario_of(std::move(name), text, shape.num_ranks, shape, body);
  scenario.has_death = has_death;
  scenario.steps_on_payload = steps_on_payload;
  return scenario;
}

Phases phases(int num_ranks, int num_phases, Phases::Writers writers, int region_blocks,
              bool has_copies = false) {
  Phases shape{};
  shape.num_ranks = num_ranks;
  shape.num_phases = num_phases;
  shape.writers = writers;
  shape.region_blocks = region_blocks;
  shape.has_copies = has_copies;
  return shape;
}

Phases payload(int num_ranks, int num_phases, Phases::Writers writers) {
  Phases shape = phases(num_ranks, num_phases, writers, 1);
  shape.is_payload = true;
  return shape;
}

/// Lent buffers: each rank sums its own block of all buffers into all of them. Only the boards'
/// cursors order a call and the next one, which fills the buffers again.
struct Lending {
  int num_ranks;
  int num_calls;

  BoardGeometry geometry = {};
  std::vector<std::byte*> inputs = {};   ///< per rank: a buffer's worth for each call
  std::vector<std::byte*> outputs = {};  ///< per rank: the same
  std::vector<std::byte*> lent = {};     ///< per rank: its buffer, a block for each rank

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
  const std::string text = "lent buffers, " + std::to_string(num_ranks) + " ranks, " +
                           std::to_string(num_calls) + " calls";
  const Lending shape{.num_ranks = num_ranks, .num_calls = num_calls};
  Scenario scenario = scenario_of(std::move(name), text, num_ranks, shape, run_calls);
  scenario.has_death = has_death;
  scenario.steps_on_payload = steps_on_payload;
  return scenario;
}

}  // namespace

std::vector<Scenario> board_scenarios() {
  using Writers = Phases::Writers;
  return {
      board("board2", phases(2, 4, Writers::kAll, 2), false, true),
      board("board2_death", phases(2, 3, Writers::kAll, 2), true, true),
      board("board3_first", phases(3, 3, Writers::kFirst, 1), false, true),
      board("board3_in_turn", phases(3, 4, Writers::kInTurn, 1), false, true),
      board("board3_all", phases(3, 3, Writers::kAll, 1), false, false),
      board("board3_first_death", phases(3, 3, Writers::kFirst, 1), true, true),
      board("board2_copies", phases(2, 4, Writers::kAll, 2, true), false, true),
      board("board2_copies_death", phases(2, 3, Writers::kAll, 1, true), true, true),
      board("board3_copies", phases(3, 3, Writers::kFirst, 1, true), false, true),
      board("board2_payload", payload(2, 4, Writers::kAll), false, true),
      board("board2_payload_death", payload(2, 3, Writers::kAll), true, true),
      board("board3_payload", payload(3, 4, Writers::kInTurn), false, true),
      lend("lend2", 2, 2, false, true),
      lend("lend2_death", 2, 2, true, true),
      lend("lend3", 3, 1, false, false),
  };
}

}  // namespace ringcomm::checker
