// What nvcc's code moves through global memory, counted, beside what its calls must move.
#include <cstdint>
#include <cstdio>
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
  if (static_cast<double>(data.bytes) > kMostOfIdeal * ideal_bytes) fault += "too many bytes; ";
  if (static_cast<double>(data.bytes) < ideal_bytes) fault += "too few bytes; ";
  for (const auto& [line, count] : counts) {
    const bool is_shared = line.what == Counted::kSharedLoad || line.what == Counted::kSharedStore;
    if (count.wasted > 0)
      fault += line.kernel + " line " + std::to_string(line.line) +
               (is_shared ? ": bank conflicts; " : ": parts of sectors; ");
  }
  return fault;
}

/// A line of the table.
std::string line_of(const std::string& name, const Counts& counts, double ideal_bytes) {
  const Count data = data_of(counts);
  const auto num = [&](Counted what) {
    return static_cast<unsigned long long>(total(counts, what).num);
  };
  char line[160];
  std::snprintf(line, sizeof line, "%-34s %8.3f %6.4f %7.4f %8llu %8llu %8llu\n", name.c_str(),
                static_cast<double>(data.bytes) / 1e6,
                static_cast<double>(data.bytes) / ideal_bytes,
                32 * static_cast<double>(data.sectors) / static_cast<double>(data.bytes),
                num(Counted::kBarrier), num(Counted::kPublish), num(Counted::kPoll));
  return line;
}
const char* const kColumns =
    "\n                                         MB  ideal sectors barriers  publish    polls\n";

/// Buffers at multiples of 512 bytes, as torch's.
class Buffers {
 public:
  std::byte* add(std::size_t num_bytes) {
    memory_.emplace_back(num_bytes + kAlignment);
    void* begin = memory_.back().data();
    std::size_t space = memory_.back().size();
    return static_cast<std::byte*>(std::align(kAlignment, num_bytes, begin, space));
  }

 private:
  static constexpr std::size_t kAlignment = 512;
  std::vector<std::vector<std::byte>> memory_;
};

struct Run {
  OpKind op = OpKind::kAllReduce;
  Path path = Path::kInPlace;
  int num_ranks = 2;
  std::size_t num_bytes = 1 << 20;  // of the longer buffer
  std::size_t offset_bytes = 0;     // of all buffers

  std::string name() const {
    return std::string(name_of(op)) + " " + benchmarks::kPathNames[static_cast<int>(path)] + " " +
           std::to_string(num_ranks);
  }
};

struct Result {
  Counts counts;
  benchmarks::PlannedCall call;  // rank 0's
};

Result counted(const Run& run) {
  const auto world = static_cast<std::size_t>(run.num_ranks);
  const bool has_update = run.op == OpKind::kReduceUpdateGather;
  const bool has_shares = run.op == OpKind::kReduceScatter || run.op == OpKind::kAllGather;
  const std::size_t share_bytes = run.num_bytes / world;
  GpuRanks ranks(run.num_ranks, {.world_size = run.num_ranks, .min_multiprocessors = 16}, 1);
  Result result;
  ptx::start_counting();
  run_threads(run.num_ranks, [&](int rank) {
    Buffers buffers;
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
    for (float*& state : call.states) state = reinterpret_cast<float*>(buffers.add(share_bytes));
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    std::byte* const input = buffers.add(run.num_bytes + run.offset_bytes) + run.offset_bytes;
    std::byte* const output = buffers.add(run.num_bytes + run.offset_bytes) + run.offset_bytes;
    for (std::size_t share = 0; share < world; ++share) {
      inputs.push_back(input + share * share_bytes);
      outputs.push_back(output + share * share_bytes);
    }
    call.inputs = inputs.data();
    call.outputs = outputs.data();
    call.num_elems = (has_shares ? share_bytes : run.num_bytes) / element_bytes(call.dtype);
    ranks.run(rank, call, run.path == Path::kInPlace);
    expect(ranks.control(rank).stop == 0, "a kernel that does not fail");
    if (rank != 0) return;
    cuda::KernelCall kernel = ranks.kernel_call(0);
    const cuda::LaunchPlan plan = ranks.plan_call(call, kernel);
    const bool is_staged = run.path == Path::kStaged;
    result.call = benchmarks::planned_call(call, is_staged, run.num_bytes, kernel, plan);
    expect(result.call.path == run.path, "the path that is asked for");
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
  std::string table = kColumns;
  for (const OpKind op : {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather,
                          OpKind::kReduceUpdateGather})
    for (const Path path : {Path::kStaged, Path::kInPlace, Path::kRing})
      for (const int num_ranks : {2, 4}) {
        if (path == Path::kRing && op != OpKind::kAllReduce) continue;
        const Run run{.op = op, .path = path, .num_ranks = num_ranks};
        CAPTURE(run.name());
        const Counts counts = counted(run).counts;
        CHECK(fault_of(counts, ideal_bytes(run)) == "");
        for (const auto& [line, count] : counts)
          if (line.what == Counted::kPublish || line.what == Counted::kPoll)
            CHECK((line.kernel == "ringcomm_open" || line.kernel == "ringcomm_close" ||
                   path == Path::kRing));
        table += line_of(run.name(), counts, ideal_bytes(run));
      }
  MESSAGE(table);
}

#define RINGCOMM_NAME_AND_COMMA(name, Call, body) #name,
TEST_CASE("counts: plain kernels access nothing as other ranks' kernels do") {
  const std::set<std::string> plain{RINGCOMM_PLAIN_KERNELS(RINGCOMM_NAME_AND_COMMA)
                                        RINGCOMM_UPDATE_KERNELS(RINGCOMM_NAME_AND_COMMA)};
  int num_plain = 0;
  std::string faults;
  const auto folder = std::filesystem::path(RINGCOMM_EMULATOR).parent_path();
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    if (file.path().extension() != ".ptx") continue;
    std::ifstream text(file.path());
    for (std::string line, name; std::getline(text, line);) {
      const auto has = [&](const char* word) { return line.find(word) != std::string::npos; };
      if (has(".entry ")) {
        name = line.substr(line.find("ringcomm_"), line.find('(') - line.find("ringcomm_"));
        num_plain += plain.contains(name) ? 1 : 0;
      }
      if (plain.contains(name) && (has(".sys") || has("volatile.global"))) faults += name + line;
    }
  }
  CHECK(faults == "");
  CHECK(num_plain >= 9);
}

// Data is loaded once for all peers and once to be reduced, and takes half of a packet. Each warp
// loads the number of the block's calls. Headers before the packets, and digests before the words
// to be reduced, shift a warp's words from the beginning of a sector.
TEST_CASE("counts: packets move twice the data to each peer, and a header for each block") {
  std::string table = kColumns;
  for (const int num_ranks : {2, 4}) {
    const Run run{.path = Path::kOneRound, .num_ranks = num_ranks, .num_bytes = 8 << 10};
    CAPTURE(run.name());
    const Result result = counted(run);
    const double num_blocks = result.call.num_blocks;
    const double ideal = num_ranks * (3 * static_cast<double>(run.num_bytes) +
                                      (cuda::kBlockThreads / 32 + 1) * 8 * num_blocks);
    const Count data = data_of(result.counts);
    CHECK(static_cast<double>(data.bytes) == ideal);
    CHECK(32 * static_cast<double>(data.sectors) <= 1.2 * ideal);
    const double num_packets = num_blocks * cuda::kHeaderPackets +
                               static_cast<double>(run.num_bytes) / sizeof(std::uint64_t);
    const double put = num_ranks * (num_ranks - 1) * num_packets * sizeof(Packet);
    const double stored =
        static_cast<double>(total(result.counts, Counted::kPacketStore).bytes) / put;
    CHECK(stored >= 1);
    CHECK(stored <= 1.01);
    CHECK(total(result.counts, Counted::kPublish).num == 0);
    table += line_of(run.name(), result.counts, ideal);
  }
  MESSAGE(table);
}

// Vectors between two sectors touch a sector more for a warp's 16. Buffers that begin between two
// vectors are reduced by elements, of which a warp's touch three sectors instead of two.
TEST_CASE("counts: buffers that begin between sectors or vectors, and ends that fill none") {
  std::string table = kColumns;
  for (const std::size_t offset_bytes : {16, 2}) {
    const Run run{.num_bytes = (1 << 20) + 44, .offset_bytes = offset_bytes};
    const Counts counts = counted(run).counts;
    const Count data = data_of(counts);
    CHECK(static_cast<double>(data.bytes) <= 1.02 * ideal_bytes(run));
    CHECK(static_cast<double>(32 * data.sectors) <=
          (offset_bytes == 16 ? 1.09 : 1.53) * static_cast<double>(data.bytes));
    table += line_of(run.name() + ", " + std::to_string(offset_bytes) + " bytes off", counts,
                     ideal_bytes(run));
  }
  MESSAGE(table);
}

// Ignored rows, one in three here, are only written.
TEST_CASE("counts: cross-entropy in clusters reads and writes each row once") {
  std::string table = kColumns;
  for (const unsigned blocks : {1U, 4U}) {
    const LossOptions options{
        .width = static_cast<int>(16'384 * blocks), .num_tokens = 12, .cluster_blocks = blocks};
    LossCase test(options);
    ptx::start_counting();
    test.run();
    const Counts counts = ptx::stop_counting();
    const double ideal = 2.0 * options.width * (options.num_tokens * 5 / 3);
    CHECK(fault_of(counts, ideal) == "");
    table += line_of("cross_entropy, clusters of " + std::to_string(blocks), counts, ideal);
  }
  MESSAGE(table);
}

// Every second word: half of each sector, and two words of each bank.
TEST_CASE("counts: the gate finds accesses with a stride") {
  const ptx::Kernel* const kernel = ptx::find_translated("ringcomm_strided");
  REQUIRE(kernel != nullptr);
  for (const unsigned stride : {1U, 2U}) {
    Buffers buffers;
    const struct {
      std::byte *from, *to;
      unsigned stride;
    } params{buffers.add(1024), buffers.add(1024), stride};
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
