#include <memory>

#include "checker_arch.h"
#include "core/survivor_protocol.h"
#include "scenarios.h"

namespace ringcomm::checker {
namespace {

constexpr int kAttempts = 2;

/// The words of the agreement, and what each rank returned: its attempt and set; kLeftOut if the
/// others go on without it; 0 if no attempt succeeded.
struct Words {
  static constexpr std::uint64_t kLeftOut = 1;

  int num_ranks = 0;
  Cursor* cursors = nullptr;

  Cursor& stage(int rank) const { return cursors[rank]; }
  Cursor& result(int rank) const { return cursors[num_ranks + rank]; }
  std::uint64_t& chosen(int attempt) const { return cursors[2 * num_ranks + attempt].value; }
  std::uint64_t& verdict(int attempt) const {
    return cursors[2 * num_ranks + kAttempts + attempt].value;
  }
  std::uint64_t& proposal(int attempt, int rank, int) const {
    return cursors[2 * num_ranks + 2 * kAttempts + attempt * num_ranks + rank].value;
  }
  static std::uint64_t result_of(int attempt, std::uint64_t set) {
    return set << 8 | static_cast<std::uint64_t>(attempt) << 1;
  }

  void lay_out(Memory& memory) {
    std::vector<std::string> names;
    for (const char* name : {"stage ", "result "})
      for (int rank = 0; rank < num_ranks; ++rank) names.push_back(name + std::to_string(rank));
    for (const char* name : {"chosen ", "verdict "})
      for (int idx = 0; idx < kAttempts; ++idx) names.push_back(name + std::to_string(idx));
    for (int idx = 0; idx < kAttempts; ++idx)
      for (int rank = 0; rank < num_ranks; ++rank)
        names.push_back("proposal " + std::to_string(idx) + " of " + std::to_string(rank));
    cursors = memory.add_cursors(static_cast<int>(names.size()), names);
  }
};

using Protocol = SurvivorProtocol<CheckerArch, Words>;

WaitStatus agree(CheckerArch& arch, const Words& words, int rank, int impatient) {
  arch.waits_for_nobody = rank == impatient;
  Protocol protocol(arch, words, rank, words.num_ranks);
  RankSet asked;
  for (int peer = 0; peer < words.num_ranks; ++peer) asked.add(peer);
  std::uint64_t result = 0;
  for (int attempt = 0; attempt < kAttempts && result == 0; ++attempt) {
    static_cast<void>(protocol.join(attempt, asked));
    RankSet set;
    arch.require(protocol.find_chosen(attempt, set), ViolationKind::kWrongData, "no set");
    asked = set;
    if (!set.has(rank))
      result = Words::kLeftOut;
    else if (protocol.confirm(attempt, set, true))
      result = Words::result_of(attempt, set.word(0));
  }
  arch.store_seq_cst(words.result(rank).value, result);
  return WaitStatus::kNone;
}

// A rank that goes on does so with all ranks of the chosen set, which have made the group; no
// other attempt succeeds; a rank that is left out is in no set that succeeds.
std::string check(const Memory& memory, const Words& words, int rank) {
  const auto value = [&](const std::uint64_t& word) { return memory.peek(memory.word_idx(&word)); };
  const std::uint64_t result = value(words.result(rank).value);
  std::uint64_t agreed = 0;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (value(words.verdict(attempt)) != Protocol::kAllMade) continue;
    if (agreed != 0) return "two attempts succeeded";
    const auto chosen = static_cast<int>(value(words.chosen(attempt))) - 1;
    const std::uint64_t set = value(words.proposal(attempt, chosen, 0));
    agreed = Words::result_of(attempt, set);
    for (int peer = 0; peer < words.num_ranks; ++peer)
      if ((set >> peer & 1) != 0 &&
          value(words.stage(peer).value) < Protocol::value_of(attempt, Protocol::kMade))
        return "rank " + std::to_string(peer) + " has not made the group";
    if ((set >> rank & 1) == 0) agreed = 0;
  }
  if (result == Words::kLeftOut ? agreed != 0 : result != agreed)
    return "returned " + std::to_string(result) + " instead of " + std::to_string(agreed);
  return {};
}

Scenario survivors(std::string name, int num_ranks, bool has_death, int impatient, Extent extent) {
  auto words = std::make_shared<Words>();
  words->num_ranks = num_ranks;
  Scenario scenario;
  scenario.name = std::move(name);
  scenario.text = "survivors agree, " + std::to_string(num_ranks) + " ranks, 2 attempts";
  if (impatient >= 0) scenario.text += ", rank " + std::to_string(impatient) + " waits for nobody";
  scenario.num_ranks = num_ranks;
  scenario.extent = extent;
  scenario.has_death = has_death;
  scenario.setup = [words](Memory& memory) { words->lay_out(memory); };
  scenario.body = [words, impatient](CheckerArch& arch, int rank) {
    return agree(arch, *words, rank, impatient);
  };
  scenario.check = [words](const Memory& memory, int rank) { return check(memory, *words, rank); };
  return scenario;
}

}  // namespace

std::vector<Scenario> survivor_scenarios() {
  const Extent bounded{.kind = Extent::Kind::kBounded, .max_preemptions = 3};
  return {survivors("survivors2_death", 2, true, -1, {}),
          survivors("survivors2_impatient", 2, true, 0, {}),
          survivors("survivors3_death", 3, true, -1, bounded),
          survivors("survivors3_impatient", 3, true, 1, bounded)};
}

}  // namespace ringcomm::checker
