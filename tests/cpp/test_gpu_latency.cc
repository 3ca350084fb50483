// What the latency model (benchmarks/gpu/latency_model.h) says of the plans of calls of ranks on
// one H200, or on one each, beside the aims. A change of plan that misses an aim shows here;
// docs/design/gpu.md has the tables.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "cuda/collectives/launch_plan.h"
#include "gpu/latency_model.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using benchmarks::LatencyModel;
using benchmarks::PlannedCall;

constexpr std::size_t kMiB = 1 << 20;
constexpr int kMultiprocessors = 132;
constexpr double kSlower = 1.3;
constexpr double kLeastRatio = 1.1;  // to NCCL, with latencies that much longer

LatencyModel model_of(double slower) { return LatencyModel(4.28e6, slower); }

cuda::StagingLayout layout_of(int num_ranks, bool has_own_gpus = false) {
  return cuda::make_staging_layout({.world_size = num_ranks,
                                    .max_ranks_per_device = has_own_gpus ? 1 : num_ranks,
                                    .min_multiprocessors = kMultiprocessors});
}

/// Of bfloat16, as the plan chooses.
PlannedCall plan(int num_ranks, std::size_t num_bytes, bool is_staged = false,
                 OpKind op = OpKind::kAllReduce, bool has_own_gpus = false) {
  cuda::KernelCall kernel;
  kernel.world_size = num_ranks;
  kernel.staging.layout = layout_of(num_ranks, has_own_gpus);
  const std::vector<const void*> inputs(cuda::kMaxRanks);
  const std::vector<void*> outputs(cuda::kMaxRanks);
  const std::size_t num_shards = op == OpKind::kAllReduce ? 1 : static_cast<std::size_t>(num_ranks);
  Collective call{{.num_elems = num_bytes / 2 / num_shards, .op = op, .dtype = DType::kBFloat16},
                  inputs.data(),
                  outputs.data()};
  cuda::plan_algorithm({}, kernel.staging.layout, call);
  const cuda::LaunchPlan launch = cuda::plan_launch(call, kMultiprocessors, kernel);
  PlannedCall planned = benchmarks::planned_call(call, is_staged, num_bytes, kernel, launch);
  planned.has_own_gpus = has_own_gpus;
  return planned;
}

template <class... Values>
std::string line_of(const char* format, const Values&... values) {
  char line[200];
  std::snprintf(line, sizeof line, format, values...);
  return line;
}

struct Row {
  int num_ranks;
  std::size_t num_bytes;
  double nccl_us;  // in a graph, on one H200, NCCL 2.32.3, MPS, bf16
  double aim_us;   // 0: none
};
const Row kRows[] = {
    {2, 1 << 10, 11, 0},     {2, 64 << 10, 12, 0},     {2, kMiB, 20, 8},
    {2, 4 * kMiB, 38, 0},    {2, 16 * kMiB, 70, 0},    {2, 64 * kMiB, 179, 0},
    {2, 256 * kMiB, 616, 0}, {4, 1 << 10, 26, 0},      {4, 64 << 10, 28, 6.5},
    {4, kMiB, 47, 0},        {4, 4 * kMiB, 90, 0},     {4, 16 * kMiB, 195, 0},
    {4, 64 * kMiB, 437, 0},  {4, 256 * kMiB, 1540, 0}, {8, 1 << 10, 50, 0},
    {8, 64 << 10, 54, 12},   {8, kMiB, 96, 24},        {8, 4 * kMiB, 176, 0},
    {8, 16 * kMiB, 435, 0},  {8, 64 * kMiB, 917, 0},   {8, 256 * kMiB, 3347, 0},
};

TEST_CASE("latency of all_reduce on one GPU in a graph: which aims the plan should meet") {
  std::string table = "\nranks      KiB  path        us   x NCCL  % copy   staged us\n";
  for (const Row& row : kRows) {
    const PlannedCall call = plan(row.num_ranks, row.num_bytes);
    const PlannedCall staged = plan(row.num_ranks, row.num_bytes, true);
    const LatencyModel model = model_of(1);
    const double us = model.us(call);
    const std::string line =
        line_of("%5d %8zu  %-10s %7.1f %6.2f %6.0f %10.1f\n", row.num_ranks, row.num_bytes >> 10,
                benchmarks::kPathNames[static_cast<int>(call.path)], us, row.nccl_us / us,
                100 * model.share_of_copy(call), model.us(staged));
    table += line;
    CAPTURE(line);
    if (row.aim_us > 0) CHECK(us <= row.aim_us);
    CHECK(row.nccl_us / model_of(kSlower).us(call) >= kLeastRatio);
    if (row.num_bytes >= 64 * kMiB)
      CHECK(model.share_of_copy(call) >= (row.num_ranks == 8 ? 0.85 : 0.8));
    CHECK(model.share_of_copy(call) < 1);
  }
  MESSAGE(table);
}

TEST_CASE("latency of an eager all_reduce of 1 KiB, with its host path") {
  for (const int num_ranks : {2, 4, 8}) {
    const PlannedCall call = plan(num_ranks, 1 << 10);
    const double us = model_of(1).eager_us(call);
    MESSAGE(num_ranks, " ranks: ", us, " us");
    CHECK(us <= 10);
  }
}

TEST_CASE("latency of reduce_scatter and all_gather on one GPU: in place and staged") {
  const LatencyModel model = model_of(1);
  std::string table = "\nop              ranks      KiB          us  % copy   staged us\n";
  for (const OpKind op : {OpKind::kReduceScatter, OpKind::kAllGather})
    for (const int num_ranks : {2, 4, 8})
      for (const std::size_t num_bytes : {kMiB, 4 * kMiB, 16 * kMiB, 64 * kMiB, 256 * kMiB}) {
        const PlannedCall call = plan(num_ranks, num_bytes, false, op);
        table += line_of("%-15s %5d %8zu  %10.1f %7.0f  %10.1f\n", name_of(op), num_ranks,
                         num_bytes >> 10, model.us(call), 100 * model.share_of_copy(call),
                         model.us(plan(num_ranks, num_bytes, true, op)));
        CAPTURE(num_bytes);
        CHECK(model.share_of_copy(call) < 1);
        if (num_bytes >= 64 * kMiB) CHECK(model.share_of_copy(call) >= 0.75);
      }
  MESSAGE(table);
}

TEST_CASE("latency of messages on one GPU: more than 60 % of a copy from 16 MiB on") {
  const LatencyModel model = model_of(1);
  for (const int num_ranks : {2, 8})
    for (const std::size_t num_bytes : {16 * kMiB, 256 * kMiB}) {
      const auto bytes = static_cast<double>(num_bytes);
      const double us = model.message_us(bytes, num_ranks);
      const PlannedCall copy{.num_ranks = num_ranks, .num_bytes = bytes};
      MESSAGE(num_ranks, " ranks, ", num_bytes >> 20, " MiB: ", us, " us");
      CHECK(model.copy_us(copy) / us >= 0.6);
    }
}

TEST_CASE("latency of fused steps on one GPU: times their floor") {
  for (const int num_ranks : {2, 4, 8})
    for (const bool has_states : {true, false}) {
      const PlannedCall call = plan(num_ranks, 256 * kMiB);
      const LatencyModel model = model_of(1);
      const double us = model.update_us(call, has_states);
      const double ratio = us / model.update_floor_us(call, has_states);
      MESSAGE(num_ranks, std::string(has_states ? " ranks, AdamW: " : " ranks, LOMO: "), us,
              " us, ", ratio, " x its floor");
      CHECK(ratio <= 1.25);
    }
}

// A GPC has 16 or 18 multiprocessors, so clusters of four leave some unused.
TEST_CASE("latency of cross-entropy's rows in clusters: times a copy") {
  constexpr int kMostClusters = 128;  // of one block
  constexpr double kNumRows = 8192;
  for (const int num_classes : {32'000, 50'257, 128'256})
    for (const double slower : {1.0, kSlower}) {
      const auto row_bytes = std::int64_t{2} * num_classes;
      const auto rows = cuda::plan_loss(row_bytes, num_classes % 8 == 0);
      REQUIRE(rows.has_value());
      const LatencyModel model = model_of(slower);
      const auto bytes = static_cast<double>(row_bytes);
      const double us = model.loss_rows_us(kNumRows, bytes, *rows,
                                           kMostClusters / static_cast<int>(rows->cluster_blocks));
      const double ratio = us / model.loss_rows_copy_us(kNumRows, bytes);
      MESSAGE(num_classes, " classes, latencies times ", slower, ": ", us, " us, ", ratio,
              " x a copy");
      if (num_classes == 128'256 && slower == 1) CHECK(ratio <= 1.25);
    }
}

TEST_CASE("latency of cross-entropy over shards of the vocabulary: times a copy") {
  for (const double slower : {1.0, kSlower}) {
    const LatencyModel model = model_of(slower);
    for (const double num_ranks : {1., 2., 8.}) {  // on one GPU all of the vocabulary, or on each
      const double bytes = 2. * 8192 * 128'256 / num_ranks;
      const double ratio = model.loss_shards_us(bytes) / model.loss_rows_copy_us(1, bytes);
      MESSAGE("1/", num_ranks, " of the vocabulary on a GPU, latencies times ", slower, ": ", ratio,
              " x a copy");
      CHECK(ratio <= 1.875);
    }
  }
}

// Few large blocks: each reads and writes the weight's gradient (ops/losses/linear_blocks.py).
TEST_CASE("latency of linear + cross-entropy: times its products") {
  struct Shape {
    double tokens, hidden, classes, block_tokens;
  };
  for (const Shape& of : {Shape{8192, 4096, 128'256, 2048}, Shape{8192, 4096, 128'256, 1024},
                          Shape{16384, 2048, 32'000, 4096}}) {
    const LatencyModel model = model_of(1);
    const double us = model.linear_loss_us(of.tokens, of.hidden, of.classes, of.block_tokens);
    const double ratio = us / model.products_us(of.tokens, of.hidden, of.classes);
    MESSAGE(of.classes, " classes in blocks of ", of.block_tokens, " tokens: ", us, " us, ", ratio,
            " x its products");
    if (of.hidden == 4096 && of.block_tokens == 2048) CHECK(ratio <= 1.12);
  }
}

// Ranks with GPUs of their own: the goal is NCCL's ring. With NVLS the switches add and copy, so
// less goes over the links than by any algorithm of ours: it gets the sizes from which that counts.
TEST_CASE("latency of all_reduce between GPUs: beside NCCL") {
  std::string table = "\nranks      KiB         us  NCCL's ring us  NVLS us\n";
  for (const int num_ranks : {2, 4, 8})
    for (const std::size_t num_bytes :
         {kMiB / 1024, kMiB, 2 * kMiB, 4 * kMiB, 8 * kMiB, 16 * kMiB, 64 * kMiB, 256 * kMiB}) {
      const LatencyModel model = model_of(1);
      const PlannedCall call = plan(num_ranks, num_bytes, false, OpKind::kAllReduce, true);
      const double ring_us = model.nccl_on_own_gpus_us(call, false);
      const std::string line =
          line_of("%5d %8zu  %10.1f  %14.1f  %7.1f\n", num_ranks, num_bytes >> 10, model.us(call),
                  ring_us, model.nccl_on_own_gpus_us(call, true));
      table += line;
      CAPTURE(line);
      CHECK(model.us(call) <= 1.1 * ring_us);
      if (num_ranks == 2) continue;
      const bool is_nccl = num_bytes >= cuda::kLeastSwitchBytes;
      CHECK((is_nccl ? model.nccl_on_own_gpus_us(call, true) : model.us(call)) <=
            1.1 * std::min(model.nccl_on_own_gpus_us(call, true), model.us(call)));
    }
  MESSAGE(table);
}

}  // namespace
