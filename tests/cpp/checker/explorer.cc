#include <algorithm>
#include <random>

#include "machine.h"

namespace ringcomm::checker {
namespace {

/// Limits far above every scenario; reaching one is a failure, not a result.
constexpr std::uint64_t kMaxStates = 40'000'000;
constexpr std::size_t kMaxDepth = 20'000;

/// Fingerprints of the states seen. Two different states with one fingerprint would hide the
/// second: with 64 bits and 10^7 states the odds are under 10^-5.
class VisitedSet {
 public:
  VisitedSet() : slots_(1 << 16) {}

  /// False if it was there.
  bool insert(std::uint64_t key) {
    key += key == 0 ? 1 : 0;  // 0 marks an empty place
    if (2 * (size_ + 1) > slots_.size()) grow();
    std::uint64_t& slot = find(key);
    if (slot == key) return false;
    slot = key;
    ++size_;
    return true;
  }
  std::uint64_t size() const { return size_; }

 private:
  std::uint64_t& find(std::uint64_t key) {
    std::size_t at = key & (slots_.size() - 1);
    while (slots_[at] != 0 && slots_[at] != key) at = (at + 1) & (slots_.size() - 1);
    return slots_[at];
  }
  void grow() {
    std::vector<std::uint64_t> old(4 * slots_.size());
    old.swap(slots_);
    for (const std::uint64_t key : old) {
      if (key != 0) find(key) = key;
    }
  }

  std::vector<std::uint64_t> slots_;
  std::uint64_t size_ = 0;
};

/// A state with transitions still to be tried.
struct Branch {
  std::vector<Transition> transitions;
  std::size_t next_idx = 0;
  std::vector<std::byte> saved;  ///< only if there is more than one transition
};

void fill_trace(const Machine& machine, Result& result) {
  for (const Event& event : machine.trace()) result.trace.push_back(machine.describe(event));
}

/// Depth first, over states that differ. The first child continues from the machine's state, the
/// others after a restore.
class DepthFirst {
 public:
  DepthFirst(Machine& machine, int max_preemptions)
      : machine_(machine), max_preemptions_(max_preemptions) {}

  Result run() {
    visited_.insert(machine_.hash());
    enter();
    while (depth_ > 0 && !machine_.memory.violation && !result_.hit_limit) {
      Branch& branch = path_[depth_ - 1];
      if (branch.next_idx == branch.transitions.size()) {
        --depth_;
        continue;
      }
      if (branch.next_idx > 0) machine_.restore(branch.saved.data());
      machine_.apply(branch.transitions[branch.next_idx++]);
      ++result_.num_transitions;
      if (machine_.memory.violation || !visited_.insert(machine_.hash())) continue;
      enter();
    }
    result_.num_states = visited_.size();
    result_.violation = machine_.memory.violation;
    if (result_.violation || result_.hit_limit) fill_trace(machine_, result_);
    return result_;
  }

 private:
  void enter() {
    if (depth_ == path_.size()) path_.emplace_back();
    Branch& branch = path_[depth_++];
    branch.next_idx = 0;
    machine_.list_enabled(branch.transitions, max_preemptions_);
    branch.saved.clear();
    if (branch.transitions.size() > 1) machine_.save(branch.saved);
    if (branch.transitions.empty()) {
      ++result_.num_ends;
      machine_.check_end();
    }
    result_.max_depth = std::max<std::uint64_t>(result_.max_depth, depth_);
    result_.hit_limit = depth_ > kMaxDepth || visited_.size() > kMaxStates;
  }

  Machine& machine_;
  int max_preemptions_;
  VisitedSet visited_;
  std::vector<Branch> path_;  // entries past depth_ are kept for their memory
  std::size_t depth_ = 0;
  Result result_;
};

/// Schedules drawn at random, from a fixed seed. A rank keeps running for a few steps at a time:
/// walks that switch at every step never let one rank get far ahead of another.
Result walk(Machine& machine, const Scenario& scenario, int victim) {
  Result result;
  std::mt19937_64 random(scenario.extent.seed);
  std::vector<Transition> transitions;
  for (int i = 0; i < scenario.extent.num_walks && !result.violation; ++i) {
    machine.reset(scenario, victim, false);
    const std::uint64_t stickiness = random() % 16;  // of 16: how often the same rank goes on
    std::uint64_t depth = 0;
    int last_rank = -1;
    for (machine.list_enabled(transitions, 0); !transitions.empty() && !machine.memory.violation;
         machine.list_enabled(transitions, 0)) {
      Transition chosen = transitions[random() % transitions.size()];
      for (const Transition& other : transitions) {
        const bool goes_on = other.rank == last_rank && other.kind == Transition::Kind::kStep;
        if (goes_on && random() % 16 < stickiness) chosen = other;
      }
      if (chosen.kind == Transition::Kind::kKill && random() % 16 != 0) continue;
      last_rank = chosen.rank;
      machine.apply(chosen);
      ++result.num_transitions;
      if (++depth > kMaxDepth) {
        result.hit_limit = true;
        fill_trace(machine, result);
        return result;
      }
    }
    if (!machine.memory.violation) machine.check_end();
    ++result.num_ends;
    result.max_depth = std::max(result.max_depth, depth);
    result.violation = machine.memory.violation;
  }
  if (result.violation) fill_trace(machine, result);
  return result;
}

}  // namespace

void Result::add(const Result& other) {
  num_states += other.num_states;
  num_transitions += other.num_transitions;
  num_ends += other.num_ends;
  max_depth = std::max(max_depth, other.max_depth);
  hit_limit |= other.hit_limit;
  if (!other.violation && !other.hit_limit) return;
  violation = other.violation;
  trace = other.trace;
}

Result explore(Machine& machine, const Scenario& scenario) {
  Result result;
  const bool is_bounded = scenario.extent.kind == Extent::Kind::kBounded;
  const int num_victims = scenario.has_death ? scenario.num_ranks : 1;
  for (int i = 0; i < num_victims && !result.violation && !result.hit_limit; ++i) {
    const int victim = scenario.has_death ? i : -1;
    if (scenario.extent.kind == Extent::Kind::kWalks) {
      result.add(walk(machine, scenario, victim));
      continue;
    }
    machine.reset(scenario, victim, is_bounded);
    result.add(DepthFirst(machine, scenario.extent.max_preemptions).run());
  }
  return result;
}

}  // namespace ringcomm::checker
