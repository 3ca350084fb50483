// Collectives by nvcc's PTX on the CPU: the kernels of the short form, in the types that they have.
#include <cstdint>
#include <vector>

#include "gpu_ranks.h"
#include "ptx/machine.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;

void run_cases(int world_size, const std::vector<Case>& cases, bool lends) {
  GpuRanks ranks(world_size, {.world_size = world_size, .min_multiprocessors = 2}, 1);
  run_threads(world_size, [&](int rank) {
    for (const Case& c : cases) ranks.run_case(rank, c, lends);
  });
}

TEST_CASE("ptx: the kernels are those of nvcc") {
  for (const char* name : {"ringcomm_one_shot_bfloat16", "ringcomm_move"}) {
    REQUIRE(emulator::find_kernel(name) != nullptr);
    CHECK(emulator::find_kernel(name)->code == ptx::find_translated(name));
  }
  CHECK(emulator::find_kernel("ringcomm_no_such_kernel") == nullptr);
}

TEST_CASE("ptx: sums and maxima of bfloat16 by every algorithm, and of integers") {
  for (const int world_size : {2, 3}) {
    std::vector<Case> cases;
    std::uint32_t salt = 0;
    for (const std::size_t num_elems : {std::size_t{3}, std::size_t{517}, std::size_t{30'001}}) {
      for (const Reduction reduction : {Reduction::kSum, Reduction::kMax})
        for (const Algorithm algorithm :
             {Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kRing})
          cases.push_back({.dtype = DType::kBFloat16,
                           .reduction = reduction,
                           .algorithm = algorithm,
                           .num_elems = num_elems,
                           .is_in_place = salt % 2 == 0,
                           .salt = ++salt});
      for (const DType dtype : {DType::kInt64, DType::kInt32})
        cases.push_back({.dtype = dtype,
                         .algorithm = Algorithm::kTwoShot,
                         .num_elems = num_elems,
                         .salt = ++salt});
    }
    run_cases(world_size, cases, false);
  }
}

TEST_CASE("ptx: moves and reduce_scatter, staged and in place") {
  for (const bool lends : {false, true}) {
    std::vector<Case> cases;
    std::uint32_t salt = 0;
    for (const std::size_t num_elems : {std::size_t{5}, std::size_t{9'001}})
      for (const OpKind op : {OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kBroadcast,
                              OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll})
        cases.push_back({.op = op,
                         .dtype = reduces(op) ? DType::kBFloat16 : DType::kByte,
                         .root = rooted(op) ? 1 : -1,
                         .num_elems = num_elems,
                         .salt = ++salt});
    run_cases(3, cases, lends);
  }
}

}  // namespace
