// What nvcc's code moves through global memory, counted, beside what its calls must move.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "cuda/kernels/kernel_list.h"
#include "gpu/latency_model.h"
#include "gpu_ranks.h"
#include "loss_case.h"
#include "ptx/counts.h"
#include "ptx/machine.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;
using benchmarks::Path;
using ptx::Count;
using ptx::Counted;
using ptx::Counts;

Count data_of(const Counts& counts) {
  Count data = total(counts, Counted::kLoad);
  for (const Counted what : {Counted::kStore, Counted::kBulkLoad, Counted::kBulkStore})
    data += total(counts, what);
  return data;
}

/// The gate: what is wrong with the data accesses of a call that must move `ideal_bytes`; "" if
/// nothing is. Headers, tables and scalars come beside the data.
std::string fault_of(const Counts& counts, double ideal_bytes) {
  constexpr double kMostOfIdeal = 1.02;
  const Count data = data_of(counts);
  std::string fault;
  const double of_ideal = static_cast<double>(data.bytes) / ideal_bytes;
  if (of_ideal < 1 || of_ideal > kMostOfIdeal)
    fault += std::to_string(of_ideal) + " times the least bytes; ";
  for (const auto& [line, count] : counts) {
    const bool is_shared = line.what == Counted::kSharedLoad || line.what == Counted::kSharedStore;
    if (count.wasted > 0)
      fault += line.kernel + " line " + std::to_string(line.line) +
               (is_shared ? ": bank conflicts; " : ": parts of sectors; ");
  }
  return fault;
}

struct Run {
  OpKind op = OpKind::kAllReduce;
  Path path = Path::kInPlace;
  int num_ranks = 2;
  std::size_t num_bytes = 1 << 20;  // of the longer buffer
  std::size_t offset_bytes = 0;     // of all buffers
  int num_multiprocessors = 16;

  std::string name() const {
    return std::string(name_of(op)) + " " + benchmarks::kPathNames[static_cast<int>(path)] + " " +
           std::to_string(num_ranks);
  }
};

struct Result {
  Counts counts;
  benchmarks::PlannedCall call;    // rank 0's
  std::uint64_t num_barriers = 0;  // of the ranks
};

Result counted(const Run& run) {
  const auto world = static_cast<std::size_t>(run.num_ranks);
  const bool has_update = run.op == OpKind::kReduceUpdateGather;
  const std::size_t share_bytes = run.num_bytes / world;
  GpuRanks ranks(run.num_ranks,
                 {.world_size = run.num_ranks, .min_multiprocessors = run.num_multiprocessors}, 1);
  Result result;
  ptx::start_counting();
  run_threads(run.num_ranks, [&](int rank) {
    std::vector<ptx::AlignedBytes> buffers;
    const auto add = [&](std::size_t num_bytes) {
      return buffers.emplace_back(num_bytes + run.offset_bytes).data() + run.offset_bytes;
    };
    Collective call{{.op = run.op,
                     .dtype = has_update ? DType::kFloat32 : DType::kBFloat16,
                     .algorithm = run.path == Path::kOneRound ? Algorithm::kOneShot
                                  : run.path == Path::kRing   ? Algorithm::kRing
                                                              : Algorithm::kTwoShot}};
    if (has_update) {
      call.has_update = true;
      call.update = {.lr = 0.01, .coefficients = {0.9, 0.999, 1e-8}, .step = 1};
      call.update.optimizer = Optimizer::kAdamW;
    }
    for (float*& state : call.states) state = reinterpret_cast<float*>(add(share_bytes));
    std::vector<const void*> inputs{add(run.num_bytes)};
    std::vector<void*> outputs{add(run.num_bytes)};
    for (std::size_t share = 1; share < world; ++share) {
      inputs.push_back(static_cast<const std::byte*>(inputs[0]) + share * share_bytes);
      outputs.push_back(static_cast<std::byte*>(outputs[0]) + share * share_bytes);
    }
    call.inputs = inputs.data();
    call.outputs = outputs.data();
    call.num_elems = (has_shards(run.op) ? share_bytes : run.num_bytes) / element_bytes(call.dtype);
    ranks.run(rank, call, run.path == Path::kInPlace);
    expect(ranks.control(rank).stop == 0, "a kernel that does not fail");
    if (rank != 0) return;
    cuda::KernelCall kernel = ranks.kernel_call(0);
    const cuda::LaunchPlan plan = ranks.plan_call(call, kernel);
    const bool is_staged = run.path == Path::kStaged;
    result.call = benchmarks::planned_call(call, is_staged, run.num_bytes, kernel, plan);
    expect(result.call.path == run.path, "the path that is asked for");
    result.num_barriers = ranks.num_rounds(0);
  });
  result.counts = ptx::stop_counting();
  return result;
}

/// Of the kernels of all ranks.
double ideal_bytes(const Run& run) {
  const double num = run.num_ranks, all = static_cast<double>(run.num_bytes);
  const bool has_update = run.op == OpKind::kReduceUpdateGather;
  // A step of the ring passes a slice on twice, and reads those results again that it does not send
  // first.
  if (run.path == Path::kRing) return (7 * num - 6) * all;
  // To scratch memory what peers read, and the parameters; from there what peers have written.
  double copies = run.op == OpKind::kAllGather ? 1 : num - 1;
  if (run.op == OpKind::kAllReduce || has_update) copies += num + (has_update ? 1 : 0);
  if (run.path != Path::kStaged) copies = 0;
  // Owners read their parts of all ranks, and write them to one rank or to all.
  if (run.op == OpKind::kReduceScatter) return (num + 1 + 2 * copies) * all;
  // AdamW: a parameter and two states are read, and two states written beside it.
  return (2 * num + (has_update ? 5 : 0) + 2 * copies) * all;
}

TEST_CASE("counts: calls move what they must, in whole sectors; plain kernels wait for nobody") {
  for (const OpKind op : {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather,
                          OpKind::kReduceUpdateGather})
    for (const Path path : {Path::kStaged, Path::kInPlace, Path::kRing})
      for (const int num_ranks : {2, 4}) {
        if (path == Path::kRing && op != OpKind::kAllReduce) continue;
        const Run run{.op = op, .path = path, .num_ranks = num_ranks};
        CAPTURE(run.name());
        const auto [counts, call, num_barriers] = counted(run);
        CHECK(fault_of(counts, ideal_bytes(run)) == "");
        CHECK(num_barriers > 0);
        for (const auto& [line, count] : counts)
          if (line.what == Counted::kPublish || line.what == Counted::kPoll)
            CHECK((line.kernel == "ringcomm_open" || line.kernel == "ringcomm_close" ||
                   path == Path::kRing));
      }
}

#define RINGCOMM_NAME_AND_COMMA(name, Call, body) #name,
TEST_CASE("counts: plain kernels access nothing as other ranks' kernels do") {
  const std::set<std::string> plain{RINGCOMM_PLAIN_KERNELS(RINGCOMM_NAME_AND_COMMA)
                                        RINGCOMM_UPDATE_KERNELS(RINGCOMM_NAME_AND_COMMA)};
  std::set<std::string> seen;  // also in what an earlier build has left
  std::string faults;
  const auto folder = std::filesystem::path(RINGCOMM_EMULATOR).parent_path();
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    if (file.path().extension() != ".ptx") continue;
    std::ifstream text(file.path());
    for (std::string line, name; std::getline(text, line);) {
      const auto has = [&](const char* word) { return line.find(word) != std::string::npos; };
      if (has(".entry ")) {
        name = line.substr(line.find("ringcomm_"), line.find('(') - line.find("ringcomm_"));
        if (plain.contains(name)) seen.insert(name);
      }
      if (plain.contains(name) && (has(".sys") || has("volatile.global"))) faults += name + line;
    }
  }
  CHECK(faults == "");
  CHECK(seen == plain);
}

// An element is loaded to be sent, to all peers at once but in moves, and stored once; one that
// this rank also keeps is loaded again. Each warp loads the number of the block's calls. Sectors
// cannot be the least: 17 packets of a header and blocks of any number of words shift the 256 bytes
// that a warp loads, to 9 sectors in place of 8, and the 512 that it sends, to 17 in place of 16.
TEST_CASE("counts: packets move twice the data to each peer, and no rank waits for a barrier") {
  for (const auto& [op, path] : {std::pair{OpKind::kAllReduce, Path::kOneRound},
                                 {OpKind::kAllReduce, Path::kTwoRounds},
                                 {OpKind::kReduceScatter, Path::kOneRound},
                                 {OpKind::kAllGather, Path::kOneRound}})
    for (const int num_ranks : {2, 4}) {
      // Two blocks of a rank: they poll, on threads of the host.
      const Run run{.op = op,
                    .path = path,
                    .num_ranks = num_ranks,
                    .num_bytes = 4 << 10,
                    .num_multiprocessors = 4};
      CAPTURE(run.name());
      const auto [counts, call, num_barriers] = counted(run);
      const double num = num_ranks, all = static_cast<double>(run.num_bytes);
      const bool has_one_buffer = path == Path::kOneRound && op == OpKind::kAllReduce;
      const double moved = has_one_buffer ? 3 : op == OpKind::kReduceScatter ? 1 + 1 / num : 2;
      const double sent = has_one_buffer             ? num - 1
                          : path == Path::kTwoRounds ? 2 * (num - 1) / num
                                                     : (num - 1) / num;
      const double ideal =
          num * (moved * all + (cuda::kBlockThreads / 32 + 1) * 8 * call.num_blocks);
      const double headers = (num - 1) * call.num_blocks * cuda::kHeaderPackets;
      const double put = num * sizeof(Packet) * (sent * all / sizeof(std::uint64_t) + headers);
      const Count data = data_of(counts), packets = total(counts, Counted::kPacketStore);
      CHECK(static_cast<double>(data.bytes) == ideal);
      CHECK(static_cast<double>(packets.bytes) >= put);
      CHECK(static_cast<double>(packets.bytes) <= 1.02 * put);
      CHECK(32 * static_cast<double>(data.sectors) <= 1.2 * ideal);
      CHECK(32 * static_cast<double>(packets.sectors) <= 1.1 * put);
      CHECK(total(counts, Counted::kPublish).num == 0);
      CHECK(num_barriers == 0);
    }
}

TEST_CASE("counts: messages move what they must, in slots and where they are") {
  for (const bool lends : {false, true}) {
    constexpr std::size_t kBytes = 1 << 20;
    GpuRanks ranks(2, {.world_size = 2, .min_multiprocessors = 16}, 1, {}, 16 << 10);
    ptx::start_counting();
    run_threads(2, [&](int rank) {
      ptx::AlignedBytes sent(kBytes), received(kBytes);
      const auto peer = static_cast<std::int16_t>(1 - rank);
      ranks.exchange(
          rank, {{sent.data(), kBytes, 0, peer, true}, {received.data(), kBytes, 0, peer, false}},
          lends);
      expect(ranks.control(rank).stop == 0, "a kernel that does not fail");
    });
    const Counts counts = ptx::stop_counting();
    const double ideal = 2 * (lends ? 2 : 4) * kBytes;
    CHECK(fault_of(counts, ideal) == "");
  }
}

// Vectors between two sectors touch a sector more for a warp's 16. Buffers that begin between two
// vectors are reduced by elements, of which a warp's touch three sectors instead of two.
TEST_CASE("counts: buffers that begin between sectors or vectors, and ends that fill none") {
  for (const std::size_t offset_bytes : {16, 2}) {
    const Run run{.num_bytes = (1 << 20) + 44, .offset_bytes = offset_bytes};
    const Counts counts = counted(run).counts;
    const Count data = data_of(counts);
    CHECK(static_cast<double>(data.bytes) <= 1.02 * ideal_bytes(run));
    CHECK(static_cast<double>(32 * data.sectors) <=
          (offset_bytes == 16 ? 1.09 : 1.53) * static_cast<double>(data.bytes));
  }
}

// Ignored rows, one in three here, are only written.
TEST_CASE("counts: cross-entropy in clusters reads and writes each row once") {
  for (const unsigned blocks : {1U, 4U}) {
    const LossOptions options{
        .width = static_cast<int>(16'384 * blocks), .num_tokens = 12, .cluster_blocks = blocks};
    LossCase test(options);
    ptx::start_counting();
    test.run();
    const Counts counts = ptx::stop_counting();
    const double ideal = 2.0 * options.width * (options.num_tokens * 5 / 3);
    CHECK(fault_of(counts, ideal) == "");
  }
}

// Every second word: half of each sector, and two words of each bank.
TEST_CASE("counts: the gate finds accesses with a stride") {
  const ptx::Kernel* const kernel = ptx::find_translated("ringcomm_strided");
  REQUIRE(kernel != nullptr);
  for (const unsigned stride : {1U, 2U}) {
    ptx::AlignedBytes from(1024), to(1024);
    const struct {
      std::byte *from, *to;
      unsigned stride;
    } params{from.data(), to.data(), stride};
    ptx::start_counting();
    ptx::run_grid(*kernel, &params, {1}, {32}, 0);
    const std::string fault = fault_of(ptx::stop_counting(), 2 * 32 * sizeof(unsigned));
    CAPTURE(fault);
    CHECK((fault == "") == (stride == 1));
    CHECK((fault.find("parts of sectors") != std::string::npos) == (stride == 2));
    CHECK((fault.find("bank conflicts") != std::string::npos) == (stride == 2));
  }
}

}  // namespace
