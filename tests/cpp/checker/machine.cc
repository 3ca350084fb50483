#include "machine.h"

#include <cstring>

#include "checker_arch.h"

namespace ringcomm::checker {
namespace {

// makecontext() hands over ints only, so the fibers find their machine here; one search at a time.
Machine* running_machine = nullptr;

bool keeps_publishing_promise(WaitStatus stop, bool has_death, bool has_abort) {
  return stop == WaitStatus::kNone || (stop == WaitStatus::kPeerDied && has_death) ||
         (stop == WaitStatus::kAborted && has_abort);
}

}  // namespace

Machine::Machine() { running_machine = this; }

void Machine::reset(const Scenario& scenario, int victim, bool counts_preemptions) {
  scenario_ = &scenario;
  victim_ = victim;
  counts_preemptions_ = counts_preemptions;
  state_ = State{};
  trace_.clear();
  memory.clear(scenario.num_ranks);
  scenario.setup(memory);
  fibers_.reset(scenario.num_ranks, &fiber_main);
  for (int rank = 0; rank < scenario.num_ranks; ++rank) run_until_point(rank);
}

void Machine::fiber_main(int rank) {
  Machine& machine = *running_machine;
  CheckerArch arch(machine, rank);
  const WaitStatus outcome = machine.scenario_->body(arch, rank);
  machine.finish(rank, outcome);
  machine.fibers_.suspend(rank);
}

void Machine::run_until_point(int rank) { fibers_.resume(rank); }

void Machine::list_enabled(std::vector<Transition>& out, int max_preemptions) const {
  out.clear();
  const auto add = [&](Transition::Kind kind, int rank) {
    out.push_back({kind, static_cast<std::uint8_t>(rank)});
  };
  const int running = static_cast<int>(state_.running_rank);
  const bool must_stay = counts_preemptions_ && state_.ranks[running].status == Status::kReady &&
                         static_cast<int>(state_.num_preemptions) >= max_preemptions;
  for (int rank = 0; rank < scenario_->num_ranks; ++rank) {
    if (memory.has_delayed(rank)) add(Transition::Kind::kFlush, rank);
  }
  for (int rank = 0; rank < scenario_->num_ranks; ++rank) {
    const bool is_ready = state_.ranks[rank].status == Status::kReady;
    if (is_ready && (!must_stay || rank == running)) add(Transition::Kind::kStep, rank);
  }
  for (int rank = 0; rank < scenario_->num_ranks; ++rank) {
    const RankState& state = state_.ranks[rank];
    if (state.status == Status::kParked && state.num_events_seen < state_.num_events) {
      add(Transition::Kind::kSliceEnd, rank);
    }
  }
  if (victim_ >= 0 && state_.ranks[victim_].is_dead == 0) add(Transition::Kind::kKill, victim_);
}

void Machine::apply(Transition transition) {
  const int rank = transition.rank;
  switch (transition.kind) {
    case Transition::Kind::kFlush: {
      const auto& oldest = memory.state.buffers[rank].stores[0];
      trace_.push_back(
          {Op::kFlush, transition.rank, static_cast<std::uint16_t>(oldest.word_idx), oldest.value});
      memory.flush_one(rank);
      break;
    }
    case Transition::Kind::kStep:
      if (counts_preemptions_) count_preemption(rank);
      run_until_point(rank);
      break;
    case Transition::Kind::kSliceEnd:
      trace_.push_back({Op::kSliceEnd, transition.rank,
                        static_cast<std::uint16_t>(state_.ranks[rank].parked_word_idx), 0});
      // Once per event: a slice that ends with nothing new to see would only park again.
      state_.ranks[rank].num_events_seen = state_.num_events;
      state_.ranks[rank].status = Status::kReady;
      break;
    case Transition::Kind::kKill:
      kill(rank);
      break;
  }
}

void Machine::count_preemption(int rank) {
  const auto next = static_cast<std::uint32_t>(rank);
  if (next == state_.running_rank) return;
  if (state_.ranks[state_.running_rank].status == Status::kReady) ++state_.num_preemptions;
  state_.running_rank = next;
}

void Machine::forget(RankState& state) {
  state.history = state.wait_history = state.wait_cursor_idx = 0;
}

void Machine::kill(int rank) {
  // Leaving through the kernel drains the store buffer.
  memory.flush_all(rank);
  RankState& state = state_.ranks[rank];
  state.is_dead = 1;
  if (state.status != Status::kFinished) state.status = Status::kDead;
  forget(state);
  ++state_.num_events;
  trace_.push_back({Op::kKill, static_cast<std::uint8_t>(rank), 0, 0});
}

void Machine::finish(int rank, WaitStatus outcome) {
  RankState& state = state_.ranks[rank];
  state.status = Status::kFinished;
  forget(state);
  state.outcome = static_cast<std::uint32_t>(outcome);
  if (outcome != WaitStatus::kNone) {
    state_.has_abort = 1;
    ++state_.num_events;
  }
  trace_.push_back({Op::kFinish, static_cast<std::uint8_t>(rank), 0, state.outcome});
}

void Machine::check_end() {
  for (int rank = 0; rank < scenario_->num_ranks; ++rank) {
    const RankState& state = state_.ranks[rank];
    if (state.status == Status::kFinished) check_outcome(rank);
    if (state.status != Status::kParked) continue;
    report(ViolationKind::kDeadlock, rank,
           "is parked on " + memory.word_name(static_cast<int>(state.parked_word_idx)) + " = " +
               std::to_string(memory.peek(static_cast<int>(state.parked_word_idx))) +
               " and nobody will wake it");
  }
}

void Machine::check_outcome(int rank) {
  const auto outcome = static_cast<WaitStatus>(state_.ranks[rank].outcome);
  const bool has_death = victim_ >= 0 && state_.ranks[victim_].is_dead != 0;
  if (!keeps_publishing_promise(outcome, has_death, state_.has_abort != 0)) {
    report(ViolationKind::kBadStop, rank,
           "stopped without a reason: " + std::to_string(state_.ranks[rank].outcome));
  }
  if (outcome != WaitStatus::kNone) return;
  const std::string fault = scenario_->check(memory, rank);
  if (!fault.empty()) report(ViolationKind::kWrongData, rank, fault);
}

void Machine::report(ViolationKind kind, int rank, const std::string& what) {
  if (!memory.violation) memory.violation = {kind, "rank " + std::to_string(rank) + " " + what};
}

std::uint64_t Machine::hash() const {
  std::uint64_t hash = 0;
  const auto* bytes = reinterpret_cast<const std::byte*>(&state_);
  for (std::size_t i = 0; i < sizeof(State); i += 8) {
    std::uint64_t value;
    std::memcpy(&value, bytes + i, 8);
    hash = mix(hash, value);
  }
  return memory.hash(hash);
}

void Machine::save(std::vector<std::byte>& out) const {
  const std::size_t at = out.size();
  const std::size_t trace_length = trace_.size();
  out.resize(at + sizeof(State) + sizeof(MemoryState) + sizeof(trace_length));
  std::byte* to = out.data() + at;
  std::memcpy(to, &state_, sizeof(State));
  std::memcpy(to + sizeof(State), &memory.state, sizeof(MemoryState));
  std::memcpy(to + sizeof(State) + sizeof(MemoryState), &trace_length, sizeof(trace_length));
  fibers_.save(out);
}

void Machine::restore(const std::byte* from) {
  std::size_t trace_length = 0;
  std::memcpy(&state_, from, sizeof(State));
  std::memcpy(&memory.state, from + sizeof(State), sizeof(MemoryState));
  std::memcpy(&trace_length, from + sizeof(State) + sizeof(MemoryState), sizeof(trace_length));
  trace_.resize(
      trace_length);  // only ever shortens: the trace now is a continuation of the one then
  fibers_.restore(from + sizeof(State) + sizeof(MemoryState) + sizeof(trace_length));
}

void Machine::point(int rank) {
  if (state_.ranks[rank].skips_point != 0) {
    state_.ranks[rank].skips_point = 0;
    return;
  }
  fibers_.suspend(rank);
}

void Machine::observe(Op op, int rank, int idx, std::uint64_t value) {
  trace_.push_back({op, static_cast<std::uint8_t>(rank), static_cast<std::uint16_t>(idx), value});
  RankState& state = state_.ranks[rank];
  const std::uint64_t what =
      mix(static_cast<std::uint64_t>(op) << 32 | static_cast<std::uint64_t>(idx), value);
  switch (op) {
    case Op::kRead:
    case Op::kReadOnce:
    case Op::kWrite:
    case Op::kStoreRelaxed:
    case Op::kStoreRelease:
    case Op::kStoreSeqCst:
      state.history = mix(state.history, what);
      state.wait_history = 0;
      return;
    case Op::kStopped:
      break;
    default:
      if (const auto cursor_idx = static_cast<std::uint64_t>(idx) / 2;
          cursor_idx != state.wait_cursor_idx) {
        state.history = mix(state.history, cursor_idx);
        state.wait_cursor_idx = cursor_idx;
        state.wait_history = 0;
      }
      if (op == Op::kAdd && value != 1) state.wait_history = 0;
  }
  state.wait_history = mix(state.wait_history, what);
}

void Machine::checkpoint(int rank, std::uint64_t step) {
  trace_.push_back({Op::kCheckpoint, static_cast<std::uint8_t>(rank), 0, step});
  forget(state_.ranks[rank]);
  state_.ranks[rank].history = mix(0, step);
}

void Machine::park(int rank, int word_idx, std::uint64_t expected) {
  // The kernel compares the globally visible value, and its low half only, because a futex word has
  // 32 bits. Entering the kernel drains the store buffer, here and in wake(), so that a lost
  // wake-up is not caused by a delay that no machine has.
  memory.flush_all(rank);
  const auto visible = static_cast<std::uint32_t>(memory.peek(word_idx));
  observe(Op::kPark, rank, word_idx, expected);
  if (visible != static_cast<std::uint32_t>(expected)) return;
  RankState& state = state_.ranks[rank];
  state.status = Status::kParked;
  state.parked_word_idx = static_cast<std::uint32_t>(word_idx);
  trace_.push_back({Op::kParked, static_cast<std::uint8_t>(rank),
                    static_cast<std::uint16_t>(word_idx), visible});
  fibers_.suspend(rank);
  state.parked_word_idx = 0;
  state.skips_point = 1;
}

void Machine::wake(int rank, int word_idx) {
  memory.flush_all(rank);
  observe(Op::kWake, rank, word_idx, 0);
  for (int other = 0; other < scenario_->num_ranks; ++other) {
    RankState& state = state_.ranks[other];
    if (state.status == Status::kParked && static_cast<int>(state.parked_word_idx) == word_idx) {
      state.status = Status::kReady;
    }
  }
}

WaitStatus Machine::stopped(int rank, int peer) {
  state_.ranks[rank].num_events_seen = state_.num_events;
  WaitStatus stop = WaitStatus::kNone;
  if (state_.ranks[peer].is_dead != 0) {
    stop = WaitStatus::kPeerDied;
  } else if (state_.has_abort != 0) {
    stop = WaitStatus::kAborted;  // another rank failed and reported it to the whole group
  }
  observe(Op::kStopped, rank, peer, static_cast<std::uint64_t>(stop));
  return stop;
}

}  // namespace ringcomm::checker
