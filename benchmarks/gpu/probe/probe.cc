// Asks the driver what ringcomm's use of GPU memory depends on, in seconds and without torch. Two
// fresh processes answer each question, so an error of one does not reach the next. Prints a line
// of JSON for each answer. benchmarks/gpu/checks.toml says what depends on it.
#include "gpu/probe/ask.h"
#include "gpu/probe/block_questions.h"
#include "gpu/probe/kernel_questions.h"
#include "gpu/probe/memory_questions.h"
#include "gpu/probe/system_questions.h"

namespace ringcomm::probe {
namespace {

// Those that may end in a fault of the GPU are last: under MPS it ends all processes there.
constexpr Question kQuestions[] = {
    {"open-twice", open_twice},
    {"by-descriptor", descriptors},
    {"attribute-cost", attribute_cost},
    {"multiprocessors", multiprocessors},
    {"clusters", clusters},
    {"own-kernel", own_kernel},
    {"peer-kernel", peer_kernel},
    {"address-again", address_again},
    {"mapped-after-launch", mapped_after_launch},
    {"freed-while-open", freed_while_open},
};

int ask_all(const std::string& only, int limit_s) {
  int num_missing = 0;
  int num_asked = 0;
  for (const Question& question : kQuestions) {
    if (!only.empty() && only != question.name) continue;
    ++num_asked;
    num_missing += ask(question, limit_s) ? 0 : 1;
  }
  if (num_asked == 0) throw std::runtime_error("there is no question " + only);
  return num_missing == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ringcomm::probe

int main(int argc, char** argv) {
  std::string only;
  int limit_s = 5;
  try {
    for (int i = 1; i < argc; i += 2) {
      const std::string option = argv[i];
      if (i + 1 == argc || (option != "--only" && option != "--limit-s"))
        throw std::runtime_error("usage: probe [--only QUESTION] [--limit-s S]");
      if (option == "--only") only = argv[i + 1];
      if (option == "--limit-s") limit_s = std::stoi(argv[i + 1]);
    }
    return ringcomm::probe::ask_all(only, limit_s);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "probe: %s\n", error.what());
    return 2;
  }
}
