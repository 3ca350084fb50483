// Runs litmus tests on the weak memory, each many times, in random orders of their instructions.
// Standard input has tests of lines, each ended by "run NUM SEED":
//   thread CTA GPU                 begins a thread
//   ld ORDER SCOPE REGISTER WORD   registers and words are numbers
//   st ORDER SCOPE WORD VALUE
//   fence ORDER SCOPE
//   bar NUMBER                     of all threads of the block that have it
// Standard output has a line for each test: every outcome that was seen, as the values of all
// registers by thread, and how often.
#include <cstdio>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

#include "ptx/weak_memory.h"

namespace ringcomm::ptx {
namespace {

struct Instruction {
  std::string name;
  Order order = Order::kWeak;
  Scope scope = Scope::kSys;
  u32 first = 0, second = 0;
};
struct Thread {
  u32 cta = 0, gpu = 0;
  std::vector<Instruction> instructions;
};

const std::map<std::string, Order> kOrders = {
    {"weak", Order::kWeak},       {"relaxed", Order::kRelaxed}, {"acquire", Order::kAcquire},
    {"release", Order::kRelease}, {"acq_rel", Order::kAcqRel},  {"sc", Order::kSeqCst}};
const std::map<std::string, Scope> kScopes = {
    {"cta", Scope::kCta}, {"gpu", Scope::kGpu}, {"sys", Scope::kSys}};

class Run {
 public:
  Run(const std::vector<Thread>& threads, u64 seed) : memory_(seed) {
    std::map<u32, std::vector<std::size_t>> of_blocks;
    for (std::size_t i = 0; i < threads.size(); ++i) of_blocks[threads[i].cta].push_back(i);
    for (const auto& [cta, members] : of_blocks) {
      const Place place{threads[members[0]].gpu, cta, cta};
      blocks_.push_back(memory_.begin_block(place, static_cast<u32>(members.size())));
      for (std::size_t i = 0; i < members.size(); ++i)
        states_[members[i]] = {&threads[members[i]], &blocks_.back()->threads[i]};
    }
  }

  std::string outcome(u64 seed) {
    u64 random = seed * 0x9e3779b97f4a7c15u | 1;
    for (;;) {
      std::vector<State*> ready;
      for (auto& [idx, state] : states_)
        if (!state.waits && state.next < state.code->instructions.size()) ready.push_back(&state);
      if (ready.empty()) break;
      random ^= random << 13, random ^= random >> 7, random ^= random << 17;
      step(*ready[(random >> 20) % ready.size()]);
    }
    for (const auto& block : blocks_) memory_.end_block(*block);
    std::string text;
    for (const auto& [idx, state] : states_)
      for (const auto& [number, value] : state.registers)
        text += " P" + std::to_string(idx) + ":r" + std::to_string(number) + "=" +
                std::to_string(value);
    return text;
  }

 private:
  struct State {
    const Thread* code = nullptr;
    WeakThread* thread = nullptr;
    std::size_t next = 0;
    bool waits = false;
    std::map<u32, u64> registers = {};
  };

  u64 address_of(u32 word) { return reinterpret_cast<u64>(&words_[word].value); }

  void step(State& state) {
    const Instruction& now = state.code->instructions[state.next];
    if (now.name == "bar") return arrive(state, now.first);
    ++state.next;
    if (now.name == "ld")
      state.registers[now.first] =
          memory_.load(*state.thread, address_of(now.second), 8, now.order, now.scope);
    else if (now.name == "st")
      memory_.store(*state.thread, address_of(now.first), now.second, 8, now.order, now.scope);
    else
      memory_.fence(*state.thread, now.order, now.scope);
  }

  void arrive(State& state, u32 number) {
    state.waits = true;
    std::vector<State*> members;
    std::vector<WeakThread*> threads;
    for (auto& [idx, other] : states_) {
      if (other.code->cta != state.code->cta) continue;
      for (const Instruction& each : other.code->instructions)
        if (each.name == "bar" && each.first == number) {
          members.push_back(&other);
          threads.push_back(other.thread);
        }
    }
    for (const State* each : members) {
      const auto& instructions = each->code->instructions;
      if (!each->waits || instructions[each->next].first != number) return;
    }
    const ViewRef view = state.thread->block->view_after_meeting(threads);
    for (State* each : members) {
      each->thread->view = view;
      each->waits = false;
      ++each->next;
    }
  }

  struct alignas(64) Word {
    u64 value = 0;
  };
  std::array<Word, 8> words_;
  WeakMemory memory_;
  std::vector<std::unique_ptr<WeakBlock>> blocks_;
  std::map<std::size_t, State> states_;
};

void run_all() {
  std::vector<Thread> threads;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream text(line);
    std::string name, order, scope;
    text >> name;
    Instruction now{.name = name};
    if (name == "thread") {
      Thread& added = threads.emplace_back();
      text >> added.cta >> added.gpu;
    } else if (name == "run") {
      u64 num = 0, seed = 0;
      text >> num >> seed;
      std::map<std::string, u64> outcomes;
      for (u64 i = 0; i < num; ++i) ++outcomes[Run(threads, seed + i).outcome(seed + i)];
      for (const auto& [outcome, count] : outcomes)
        std::printf("%s = %llu;", outcome.c_str(), static_cast<unsigned long long>(count));
      std::printf("\n");
      threads.clear();
    } else {
      if (name != "bar") {
        text >> order >> scope;
        now.order = kOrders.at(order);
        now.scope = kScopes.at(scope);
      }
      text >> now.first >> now.second;
      threads.back().instructions.push_back(now);
    }
  }
}

}  // namespace
}  // namespace ringcomm::ptx

int main() { ringcomm::ptx::run_all(); }
