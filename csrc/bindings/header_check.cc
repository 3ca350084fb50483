#include "bindings/header_check.h"

#include <exception>
#include <string>
#include <vector>

#include "collectives/cuda/header_words.h"

namespace ringcomm {
namespace {

cuda::HeaderWords words_of(CallHeader header) {
  if (has_private_sizes(header.op) || header.is_uneven) {
    header.num_elems = 0;
    header.is_uneven = false;
  }
  return cuda::to_words(header);
}

struct Check {
  CallHeader header;
  cuda::HeaderWords mine;
  std::vector<cuda::HeaderWords> all;

  void run(Communicator::Steps& steps) {
    const void* input = mine.data();
    std::vector<void*> outputs;
    for (cuda::HeaderWords& words : all) outputs.push_back(words.data());
    steps.run({.op = OpKind::kAllGather,
               .num_elems = sizeof mine,
               .inputs = &input,
               .outputs = outputs.data(),
               .is_counted = false});
    for (std::size_t peer = 0; peer < all.size(); ++peer) {
      if (all[peer] == mine) continue;
      CallHeader theirs = cuda::from_words(all[peer].data());
      theirs.seq = header.seq;
      steps.raise_mismatch(name_of(header.op), static_cast<int>(peer),
                           describe_difference(static_cast<int>(peer), theirs, name_of(header.op)),
                           describe(header));
    }
  }
};

}  // namespace

void check_header(const std::shared_ptr<Communicator>& communicator, const CallHeader& header,
                  std::chrono::milliseconds timeout, std::function<void(bool)> done) {
  const auto check = std::make_shared<Check>();
  check->header = header;
  check->mine = words_of(header);
  check->all.resize(static_cast<std::size_t>(communicator->world_size()));
  communicator->submit(
      [check](Communicator::Steps& steps) { check->run(steps); },
      {.timeout = timeout, .is_interrupted = {}},
      [done = std::move(done)](const std::exception_ptr& error) { done(error != nullptr); });
}

}  // namespace ringcomm
