// Large calls, with GPU kernels on host threads: buffers that peers access where they are, or in
// scratch memory, piece by piece. ThreadSanitizer checks the accesses.
#include <array>
#include <cstdint>
#include <vector>

#include "core/chunk_layout.h"
#include "gpu_ranks.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;

constexpr int kRoot = 1;
constexpr std::uint64_t kLentRounds = 2;

// Two blocks per rank, with enough elements for at least four slices each.
cuda::DeviceFacts facts_of(int world_size) {
  return {.world_size = world_size, .min_multiprocessors = 3};
}
constexpr std::size_t kManyElems = 170'000;

/// Whether a rank has anything for its peers.
bool gives(OpKind op, int rank) {
  if (op == OpKind::kBroadcast || op == OpKind::kScatter) return rank == kRoot;
  if (op == OpKind::kGather || op == OpKind::kReduce) return rank != kRoot;
  return true;
}

/// Runs a case with every relevant choice of lenders: none, all, one, all but one. If all lend,
/// it has two rendezvous; otherwise two for each piece.
void run_lenders(GpuRanks& ranks, int world_size, const Case& c) {
  CAPTURE(c.to_text());
  const auto world = static_cast<std::size_t>(world_size);
  for (const auto& [first, other] :
       {std::array{false, false}, {true, true}, {false, true}, {true, false}}) {
    std::vector<bool> lenders(world, other);
    lenders[kRoot] = first;
    bool is_staged = false;
    for (std::size_t rank = 0; rank < world; ++rank)
      is_staged = is_staged || (gives(c.op, static_cast<int>(rank)) && !lenders[rank]);
    const std::uint64_t before = ranks.num_rounds(0);
    run_threads(world_size, [&](int rank) {
      ranks.run_case(rank, c, lenders[static_cast<std::size_t>(rank)]);
    });
    const std::uint64_t num = ranks.num_rounds(0) - before;
    if (has_private_sizes(c.op))
      CHECK(num == 0);  // by messages
    else if (is_staged)
      CHECK(num > kLentRounds);
    else
      CHECK(num == kLentRounds);
  }
}

TEST_CASE("lent buffers: every op uses them if all ranks lend, and stages otherwise") {
  for (const int world_size : {2, 3}) {
    GpuRanks ranks(world_size, facts_of(world_size), 2);
    for (const OpKind op : kAllOps)
      for (const bool is_in_place : {false, true})
        for (const Case& c : CaseTable{.counts = {kManyElems / (reduces(op) ? 2 : 1)},
                                       .ops = {op},
                                       .algorithms = {Algorithm::kTwoShot},
                                       .dtypes = {!reduces(op)  ? DType::kByte
                                                  : is_in_place ? DType::kInt32
                                                                : DType::kBFloat16},
                                       .in_place = {is_in_place},
                                       .root = kRoot}
                                 .of(world_size))
          run_lenders(ranks, world_size, c);
  }
}

TEST_CASE("lent buffers: shards of different sizes, some of none") {
  for (const int world_size : {2, 4}) {
    GpuRanks ranks(world_size, facts_of(world_size), 2);
    for (const DType dtype : {DType::kBFloat16, DType::kByte}) {
      int num_run = 0;
      for (const Case& c : CaseTable{.counts = {3, 4, 5, 6, 40'000, 40'001, 40'002, 40'003},
                                     .dtypes = {dtype},
                                     .in_place = {false},
                                     .uneven = {true},
                                     .root = kRoot}
                               .of(world_size)) {
        if (reduces(c.op) == (dtype == DType::kByte)) continue;
        const bool all_lend = ++num_run % 4 != 0;
        run_threads(world_size, [&](int rank) { ranks.run_case(rank, c, all_lend || rank != 0); });
      }
    }
  }
}

// Sums of integers as a step of SGD with a rate of one: parameters are minus the sums.
TEST_CASE("lent buffers: a fused update reads gradients and writes parameters where they are") {
  constexpr int kWorldSize = 3;
  const std::size_t num_elems = kManyElems / 2 + 1;
  GpuRanks ranks(kWorldSize, facts_of(kWorldSize), 2);
  for (const DType param_dtype : {DType::kFloat32, DType::kBFloat16})
    for (const bool is_lent : {true, false}) {
      const std::uint64_t before = ranks.num_rounds(0);
      run_threads(kWorldSize, [&](int rank) {
        const Case gradients{.num_elems = num_elems, .salt = 2};
        CaseBuffers buffers(gradients, rank, kWorldSize);
        std::vector<std::byte> params(num_elems * element_bytes(param_dtype));
        void* const output = params.data();
        Collective call = buffers.call();
        call.op = OpKind::kReduceUpdateGather;
        call.outputs = &output;
        call.has_update = true;
        call.update = {.lr = 1, .step = 1};
        call.update.optimizer = Optimizer::kSgd;
        call.update.param_dtype = param_dtype;
        ranks.run(rank, call, is_lent);
        expect(ranks.control(rank).stop == 0, "a kernel that does not fail");
        const oracle::Bytes sums = reduced(gradients, kWorldSize, 0);
        oracle::Bytes expected;
        for (std::size_t i = 0; i < num_elems; ++i) {
          float sum;
          std::memcpy(&sum, sums.data() + 4 * i, 4);
          append_float(expected, param_dtype, 0.0F - sum);
        }
        expect(std::memcmp(expected.data(), params.data(), params.size()) == 0, "minus the sums");
      });
      CHECK((ranks.num_rounds(0) - before == kLentRounds) == is_lent);
    }
}

// Whether a rank's kernel writes what its peers read.
bool writes_inputs(OpKind op, const void* const* inputs, void* const* outputs) {
  GpuRanks ranks(2, facts_of(2), 1);
  const Collective call{
      {.num_elems = kManyElems, .root = rooted(op) ? kRoot : -1, .op = op, .dtype = DType::kByte},
      inputs,
      outputs};
  cuda::KernelCall kernel = ranks.kernel_call(0);
  ranks.plan_call(call, kernel);
  return cuda::writes_inputs(call, kernel);
}

TEST_CASE("lent buffers: staged if a rank's own kernel writes them") {
  std::vector<std::byte> memory(4 * kManyElems);
  std::byte* const begin = memory.data();
  const void* inputs[] = {begin, begin + kManyElems};
  const auto writes = [&](OpKind op, std::byte* own, std::byte* other) {
    void* outputs[] = {own, other};
    return writes_inputs(op, inputs, outputs);
  };
  std::byte* const apart = begin + 2 * kManyElems;
  CHECK(!writes(OpKind::kAllReduce, begin, nullptr));
  CHECK(!writes(OpKind::kReduceScatter, apart, nullptr));
  CHECK(!writes(OpKind::kReduceScatter, begin, nullptr));
  CHECK(writes(OpKind::kReduceScatter, begin + 1, nullptr));
  CHECK(!writes(OpKind::kAllGather, apart, apart + kManyElems));
  CHECK(!writes(OpKind::kAllGather, begin, apart));
  CHECK(writes(OpKind::kAllGather, apart, begin + kManyElems / 2));
  CHECK(!writes(OpKind::kBroadcast, apart, nullptr));
  CHECK(writes(OpKind::kAllToAll, apart, begin + kManyElems));
}

}  // namespace
