// Explores the interleavings of the protocols in csrc/core: `checker [--list] [--scenario
// NAME]...`.
//
// memory.h defines the machine and its checks, machine.h a state, explorer.cc the search,
// scenarios_*.cc the programs. Limits: only release and relaxed stores are delayed; a load never
// returns a value older than the newest visible one; park() has no spurious end except after a
// death.

#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "scenarios.h"

namespace ringcomm::checker {
namespace {

constexpr std::size_t kTraceLines = 60;

struct Options {
  std::vector<std::string> names;
  bool checks_owner = true;
  bool only_lists = false;
};

std::string text_of(const Scenario& scenario) {
  std::string text;
  switch (scenario.extent.kind) {
    case Extent::Kind::kAll:
      text = "all interleavings";
      break;
    case Extent::Kind::kBounded:
      text = "BOUNDED: at most " + std::to_string(scenario.extent.max_preemptions) + " preemptions";
      break;
    case Extent::Kind::kWalks:
      text = "SAMPLED: " + std::to_string(scenario.extent.num_walks) +
             " random walks per victim, seed " + std::to_string(scenario.extent.seed);
      break;
  }
  if (!scenario.steps_on_payload) text += ", payload not a scheduling point";
  if (scenario.has_death) text += ", each rank killed at each point";
  return text;
}

std::vector<Scenario> all_scenarios() {
  std::vector<Scenario> all;
  for (auto* list : {&link_scenarios, &board_scenarios, &packet_scenarios, &all_to_all_scenarios,
                     &survivor_scenarios}) {
    for (Scenario& scenario : list()) all.push_back(std::move(scenario));
  }
  return all;
}

void print_trace(const Result& result) {
  const std::size_t num_lines = result.trace.size();
  const std::size_t first = num_lines > kTraceLines ? num_lines - kTraceLines : 0;
  if (first > 0) std::printf("  ... %zu events before\n", first);
  for (std::size_t i = first; i < num_lines; ++i)
    std::printf("  %5zu  %s\n", i, result.trace[i].c_str());
}

/// True if nothing was found and nothing was cut off.
bool run(Machine& machine, const Scenario& scenario) {
  const auto begin = std::chrono::steady_clock::now();
  const Result result = explore(machine, scenario);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  const bool is_good = !result.violation && !result.hit_limit;
  std::printf(
      "%-4s %-26s %9llu states %10llu transitions %8llu ends  depth %4llu  %6.2f s  %s; %s\n",
      is_good ? "ok" : "FAIL", scenario.name.c_str(),
      static_cast<unsigned long long>(result.num_states),
      static_cast<unsigned long long>(result.num_transitions),
      static_cast<unsigned long long>(result.num_ends),
      static_cast<unsigned long long>(result.max_depth), took.count(), scenario.text.c_str(),
      text_of(scenario).c_str());
  if (result.hit_limit)
    std::printf("violation: limit: the search was cut off, so nothing is proven\n");
  if (result.violation) {
    std::printf("violation: %s: %s\n", name_of(result.violation->kind),
                result.violation->text.c_str());
  }
  if (!is_good) print_trace(result);
  std::fflush(stdout);
  return is_good;
}

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--list") == 0) {
      options.only_lists = true;
    } else if (std::strcmp(argv[i], "--no-owner") == 0) {
      options.checks_owner = false;
    } else if (std::strcmp(argv[i], "--scenario") == 0 && i + 1 < argc) {
      options.names.emplace_back(argv[++i]);
    } else {
      std::fprintf(stderr,
                   "usage: checker [--list] [--scenario NAME]... [--no-owner]\n"
                   "  --no-owner  do not check whose turn a slot is, only happens-before, data and "
                   "progress\n");
      return false;
    }
  }
  return true;
}

int run_main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) return 2;
  const auto machine = std::make_unique<Machine>();
  machine->memory.checks_owner = options.checks_owner;
  bool is_good = true;
  std::size_t num_run = 0;
  for (const Scenario& scenario : all_scenarios()) {
    bool is_wanted = options.names.empty();
    for (const std::string& name : options.names) is_wanted |= name == scenario.name;
    if (!is_wanted) continue;
    ++num_run;
    if (options.only_lists) {
      std::printf("%-26s %s; %s\n", scenario.name.c_str(), scenario.text.c_str(),
                  text_of(scenario).c_str());
    } else {
      is_good &= run(*machine, scenario);
    }
  }
  if (num_run == 0 || num_run < options.names.size()) {
    std::fprintf(stderr, "checker: no such scenario; see --list\n");
    return 2;
  }
  return is_good ? 0 : 1;
}

}  // namespace
}  // namespace ringcomm::checker

int main(int argc, char** argv) { return ringcomm::checker::run_main(argc, argv); }
