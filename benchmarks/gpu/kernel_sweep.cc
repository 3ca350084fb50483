// Times and checks ringcomm's kernels on one GPU without torch: ranks are forked processes, their
// memory is mapped as that of the engine's groups, and each call is planned, and its kernel
// launched, as the engine does it. Prints a line of JSON for each point; see kUsage.
#include <limits>
#include <map>
#include <random>
#include <sstream>

#include "cuda/collectives/launches.h"
#include "cuda/kernels/packets.h"
#include "gpu/point.h"
#include "gpu/rank_memory.h"
#include "gpu/ranks.h"

// What plans ask of fused updates, of which none is swept: so the host's SIMD code stays away.
namespace ringcomm {
UpdateOp make_update_op(const UpdateSpec&, DType) { return {}; }
std::string describe(const UpdateSpec&) { return "update"; }
}  // namespace ringcomm

namespace ringcomm::benchmarks {
namespace {

constexpr std::chrono::seconds kKernelTimeout{3};
constexpr int kLaunchesPerVisit = 5;
// Of sweeps over blocks: smaller calls use few, larger ones are as these.
constexpr std::size_t kMinSweptBytes = 1 << 20, kMaxSweptBytes = 64 << 20;
constexpr double kWarmUpSeconds = 0.3;
// Of copies that tell the rate of a GPU's memory: no cache holds them.
constexpr std::size_t kMinRateBytes = 64 << 20;

struct Options {
  int ranks = 2;
  int rounds = 10;
  int limit_s = 120;
  int calls = 0;   // of a graph; 0: by their size
  int spoil = -1;  // a rank that spoils an element of what it reads back: a test of the check
  std::vector<std::size_t> sizes = {1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20,
                                    4 << 20, 16 << 20, 64 << 20, 256 << 20};
};

constexpr const char* kUsage =
    "usage: kernel_sweep [--ranks N] [--sizes BYTES,...] [--rounds N] [--calls N]\n"
    "                    [--limit-s S]\n"
    "Prints a line of JSON for each operation, type, size and path, and for several numbers of\n"
    "blocks. Each round visits the points in another random order; there are fewer rounds where\n"
    "half of the limit (120 s) is spent. A time is that of a graph of `calls` calls on the\n"
    "slowest rank, divided by them; predicted_us is what gpu/latency_model.h says, of a GPU that\n"
    "copies as fast as this one does (as an H200, if no copy of 64 MiB is measured); gb_per_s is\n"
    "a rank's longer buffer by the median; copy_share is the time of a copy of what all ranks\n"
    "must read and write at least, divided by the median.\n"
    "The status is 1 where a result is wrong or a rank fails. Ranks share GPU 0, under MPS.\n"
    "They map each other's memory by file descriptor, as groups of torch do.";

/// One rank's part of the sweep.
class Sweep {
 public:
  /// Collective.
  Sweep(int rank, Page& page, const Options& options)
      : rank_(rank),
        page_(page),
        options_(options),
        guard_(0),
        kernels_(cuda::Kernels::of(0)),
        multiprocessors_(attribute(cuda::kMultiprocessorCount)),
        layouts_(make_layouts()),
        memory_(rank, page, layouts_,
                *std::max_element(options.sizes.begin(), options.sizes.end())) {
    for (std::size_t phase = 0; phase < kNumPhases; ++phase)
      for (int peer = 0; peer < page.num_ranks; ++peer) sums_[phase] += value_at(peer, phase);
    for (const std::size_t num_bytes : options.sizes) add_points(num_bytes);
  }

  /// Whether all results were right. Rank 0 prints.
  bool run() {
    try {
      visit_all();
    } catch (const std::exception& error) {
      if (rank_ == 0)  // what there is, of this rank alone
        for (const Point& point : points_)
          if (!point.us.empty()) print(point, point.num_wrong);
      throw std::runtime_error(std::string(error.what()) + ", in " + points_[last_].describe());
    }
    bool is_right = true;
    for (const Point& point : points_) {
      const auto mine = static_cast<std::size_t>(rank_);
      page_.num_wrong[mine] = point.num_wrong;
      page_.barrier();
      std::uint64_t num_wrong = 0;
      for (int peer = 0; peer < page_.num_ranks; ++peer)
        num_wrong += page_.num_wrong[static_cast<std::size_t>(peer)];
      if (rank_ == 0) print(point, num_wrong);
      is_right = is_right && num_wrong == 0;
      page_.barrier();
    }
    if (rank_ == 0) std::fflush(stdout);
    memory_.close(page_);
    return is_right;
  }

 private:
  // Results are checked before the times and after them: a GPU that waits for its host's checks
  // lowers its clocks.
  void visit_all() {
    std::mt19937 random(1);  // on all ranks
    std::vector<std::size_t> order(points_.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    const Clock::time_point began = Clock::now();
    const auto elapsed_s = [&] { return page_.slowest(rank_, us_since(began)) / 1e6; };
    check_all();
    const double checked_s = elapsed_s();
    while (elapsed_s() < checked_s + kWarmUpSeconds) time_graph(points_.back());
    for (int round = 0; round < options_.rounds; ++round) {
      if (round > 0 && elapsed_s() > options_.limit_s / 2.0) break;
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t i : order) {
        last_ = i;
        for (int launch = 0; launch < kLaunchesPerVisit; ++launch)
          points_[i].us.push_back(time_graph(points_[i]));
      }
    }
    check_all();
  }
  static int attribute(cuda::DeviceAttribute which) {
    int value = 0;
    cuda::check(cuda::driver().device_get_attribute(&value, which, 0), "ask the GPU");
    return value;
  }

  /// The plan's own first, then with half and twice as many blocks that wait.
  std::vector<cuda::StagingLayout> make_layouts() const {
    if (attribute(cuda::kMpsEnabled) == 0)
      throw std::runtime_error("ranks that share a GPU need MPS: start it");
    cuda::DeviceFacts facts{.world_size = page_.num_ranks,
                            .max_ranks_per_device = page_.num_ranks,
                            .min_multiprocessors = multiprocessors_};
    std::vector layouts = {cuda::make_staging_layout(facts)};
    const int planned = static_cast<int>(layouts[0].num_blocks);
    facts.min_multiprocessors = std::numeric_limits<int>::max() / 8;  // the blocks decide
    for (const int num_blocks : {planned / 2, planned * 2}) {
      facts.free_blocks = (4 * num_blocks + 2) / 3;  // a group takes three quarters of them
      const cuda::StagingLayout other = cuda::make_staging_layout(facts);
      if (num_blocks > 0 && other.num_blocks != layouts[0].num_blocks) layouts.push_back(other);
    }
    return layouts;
  }

  void add_points(std::size_t num_bytes) {
    add({.num_bytes = num_bytes, .path = Path::kCopy});
    for (const DType dtype : kTypes)
      for (const Path path :
           {Path::kOneRound, Path::kTwoRounds, Path::kInPlace, Path::kStaged, Path::kRing})
        add({.dtype = dtype, .num_bytes = num_bytes, .path = path});
    for (const OpKind op : {OpKind::kReduceScatter, OpKind::kAllGather})
      for (const Path path : {Path::kOneRound, Path::kInPlace, Path::kStaged})
        add({.op = op, .num_bytes = num_bytes, .path = path});
    if (num_bytes < kMinSweptBytes || num_bytes > kMaxSweptBytes) return;
    for (std::size_t layout = 1; layout < layouts_.size(); ++layout)
      for (const Path path : {Path::kOneRound, Path::kTwoRounds})
        add({.num_bytes = num_bytes, .path = path, .layout = layout});
  }
  /// With its graph, unless the path does not take so many bytes.
  void add(Point point) {
    point.num_calls = options_.calls > 0            ? options_.calls
                      : point.num_bytes <= 64 << 10 ? 50
                      : point.num_bytes <= 4 << 20  ? 20
                                                    : 4;
    point.planned = {.path = Path::kCopy,
                     .num_ranks = page_.num_ranks,
                     .num_bytes = static_cast<double>(point.num_bytes)};
    Prepared prepared;
    if (point.path != Path::kCopy) {
      const Path asked = point.path;
      prepare(point, prepared);
      if (point.planned.path != asked) return;
      point.num_blocks = prepared.plan.num_blocks;
    }
    Graph graph = nullptr;
    cuda::check(graphs_.begin(memory_.stream(), cuda::kCaptureRelaxed), "begin a graph");
    for (int i = 0; i < point.num_calls; ++i) {
      if (point.path == Path::kCopy)
        memory_.copy(memory_.output(), memory_.input(point.dtype), point.num_bytes);
      else
        launch(prepared);
    }
    cuda::check(graphs_.end(memory_.stream(), &graph), "end a graph");
    cuda::check(graphs_.instantiate(&point.graph, graph, 0), "make a graph ready");
    points_.push_back(point);
  }
  /// A call, with the arrays that it refers to.
  struct Prepared {
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    Collective call;
    cuda::KernelCall kernel;
    cuda::LaunchPlan plan;
    bool is_lent = false;
  };
  void launch(Prepared& of) {
    if (of.plan.kind == cuda::LaunchKind::kPackets)
      return kernels_.launch(of.plan.kernel, of.plan.num_blocks, of.kernel, memory_.stream());
    cuda::InPlaceLaunch launch(of.call, of.plan, of.kernel);
    for (cuda::PeerBuffer& buffer : launch.buffers())
      if (of.is_lent && buffer.num_bytes > 0) buffer.place = memory_.place_of(buffer.data);
    launch.run([&](std::string_view kernel, unsigned num_blocks, cuda::KernelCall& call) {
      kernels_.launch(kernel, num_blocks, call, memory_.stream());
    });
  }

  /// `point` notes what the model needs.
  void prepare(Point& point, Prepared& of) const {
    fill_frame(point.layout, of.kernel);
    const auto num_ranks = static_cast<std::size_t>(page_.num_ranks);
    const bool has_shares = point.op != OpKind::kAllReduce;
    const std::size_t elem_bytes = element_bytes(point.dtype);
    const std::size_t num_elems = point.num_bytes / elem_bytes / (has_shares ? num_ranks : 1);
    of.inputs.assign(num_ranks, memory_.input(point.dtype));
    of.outputs.assign(num_ranks, memory_.output());
    for (std::size_t share = 0; share < num_ranks; ++share) {
      if (point.op == OpKind::kReduceScatter)
        of.inputs[share] = memory_.input(point.dtype) + share * num_elems * elem_bytes;
      if (point.op == OpKind::kAllGather)
        of.outputs[share] = memory_.output() + share * num_elems * elem_bytes;
    }
    of.call = {{.num_elems = num_elems,
                .op = point.op,
                .dtype = point.dtype,
                .algorithm = point.path == Path::kOneRound ? Algorithm::kOneShot
                             : point.path == Path::kRing   ? Algorithm::kRing
                                                           : Algorithm::kTwoShot},
               of.inputs.data(),
               of.outputs.data()};
    of.is_lent = point.path == Path::kInPlace;
    const bool has_packets = point.path == Path::kOneRound || point.path == Path::kTwoRounds;
    if (!has_packets) of.kernel.staging.layout.packets_per_block = cuda::kHeaderPackets;
    cuda::plan_algorithm({}, of.kernel.staging.layout, of.call);
    of.plan = cuda::plan_launch(of.call, multiprocessors_, of.kernel);
    of.kernel.staging.layout = layouts_[point.layout];
    point.planned =
        planned_call(of.call, point.path == Path::kStaged, point.num_bytes, of.kernel, of.plan);
  }
  void fill_frame(std::size_t layout, cuda::GroupFrame& frame) const {
    frame.staging.layout = layouts_[layout];
    frame.rank = rank_;
    frame.world_size = page_.num_ranks;
    frame.timeout_ns = std::chrono::nanoseconds(kKernelTimeout).count();
    memory_.fill_frame(layout, frame);
  }

  /// Of one call, on the slowest rank. Collective.
  double time_graph(const Point& point) {
    page_.barrier();
    const Clock::time_point began = Clock::now();
    cuda::check(graphs_.launch(point.graph, memory_.stream()), "launch a graph");
    memory_.finish();
    return page_.slowest(rank_, us_since(began) / point.num_calls);
  }
  void check_all() {
    for (last_ = 0; last_ < points_.size(); ++last_)
      points_[last_].num_wrong += check(points_[last_]);
    last_ = 0;
  }
  /// Elements of this rank's output that are wrong after a call. Collective.
  std::uint64_t check(const Point& point) {
    memory_.fill(memory_.output(), 0xff, memory_.buffer_bytes());
    time_graph(point);
    return point.dtype == DType::kFloat32 ? count_wrong<std::uint32_t>(point)
                                          : count_wrong<std::uint16_t>(point);
  }
  template <class Word>
  std::uint64_t count_wrong(const Point& point) {
    const std::size_t all = point.num_bytes / sizeof(Word);
    const std::size_t share = all / static_cast<std::size_t>(page_.num_ranks);
    const auto wanted_by = [&](const auto& value_of) {
      std::vector<Word> words(kPeriod);
      for (std::size_t i = 0; i < kPeriod; ++i)
        words[i] = static_cast<Word>(bits_of(point.dtype, value_of(phase_of(i))));
      return words;
    };
    const auto of_rank = [&](int rank) {
      return wanted_by([&](std::size_t phase) { return value_at(rank, phase); });
    };
    if (point.path == Path::kCopy) return count_wrong(0, all, 0, of_rank(rank_));
    std::uint64_t num_wrong = 0;
    if (point.op == OpKind::kAllGather) {
      for (int rank = 0; rank < page_.num_ranks; ++rank)
        num_wrong += count_wrong(static_cast<std::size_t>(rank) * share, share, 0, of_rank(rank));
      return num_wrong;
    }
    const auto sums = wanted_by([&](std::size_t phase) { return sums_[phase]; });
    if (point.op == OpKind::kAllReduce) return count_wrong(0, all, 0, sums);
    return count_wrong(0, share, static_cast<std::size_t>(rank_) * share, sums);
  }
  /// Of elements from `begin` on, which should be as those from element `first` of inputs on, of
  /// which `wanted` has a period.
  template <class Word>
  std::uint64_t count_wrong(std::size_t begin, std::size_t num_elems, std::size_t first,
                            const std::vector<Word>& wanted) {
    constexpr std::size_t kAtOnce = RankMemory::kPieceBytes / sizeof(Word);
    std::uint64_t num_wrong = 0;
    for (std::size_t done = 0; done < num_elems; done += kAtOnce) {
      const std::size_t num = std::min(kAtOnce, num_elems - done);
      memory_.download(memory_.output() + (begin + done) * sizeof(Word), num * sizeof(Word));
      if (rank_ == options_.spoil && begin + done == 0) *memory_.piece() ^= std::byte{64};
      const auto* found = reinterpret_cast<const Word*>(memory_.piece());
      for (std::size_t i = 0, at = 0; i < num; i += at) {
        const Word* expected = wanted.data() + (first + done + i) % kPeriod;
        at = std::min(num - i, static_cast<std::size_t>(wanted.data() + kPeriod - expected));
        if (std::memcmp(found + i, expected, at * sizeof(Word)) == 0) continue;
        for (std::size_t k = 0; k < at; ++k) num_wrong += found[i + k] != expected[k];
      }
    }
    return num_wrong;
  }

  // ---- output

  void print(const Point& point, std::uint64_t num_wrong) const {
    const auto copied = std::find_if(points_.begin(), points_.end(), [&](const Point& other) {
      return other.path == Path::kCopy && other.num_bytes == point.num_bytes;
    });
    print_line(point, copied->quantile(0.5), model().us(point.planned), num_wrong);
  }
  /// Of a GPU that copies as this one does, if copies are measured that are large enough.
  LatencyModel model() const {
    const Point* largest = nullptr;
    for (const Point& point : points_)
      if (point.path == Path::kCopy && point.num_bytes >= kMinRateBytes && !point.us.empty() &&
          (largest == nullptr || point.num_bytes > largest->num_bytes))
        largest = &point;
    if (largest == nullptr) return LatencyModel();
    return LatencyModel::of_copy(largest->planned, largest->quantile(0.5));
  }

  int rank_;
  Page& page_;
  const Options& options_;
  cuda::ContextGuard guard_;
  std::add_lvalue_reference_t<decltype(cuda::Kernels::of(0))> kernels_;
  int multiprocessors_;
  GraphApi graphs_;
  std::vector<cuda::StagingLayout> layouts_;
  RankMemory memory_;
  std::vector<Point> points_;
  std::size_t last_ = 0;  // visited
  std::array<int, kNumPhases> sums_ = {};
};

std::vector<std::size_t> parse_sizes(const std::string& text) {
  std::vector<std::size_t> sizes;
  std::stringstream words(text);
  for (std::string word; std::getline(words, word, ',');) sizes.push_back(std::stoul(word));
  return sizes;
}

Options parse(int argc, char** argv) {
  Options options;
  const std::map<std::string, int*> numbers = {{"--ranks", &options.ranks},
                                               {"--rounds", &options.rounds},
                                               {"--calls", &options.calls},
                                               {"--limit-s", &options.limit_s},
                                               {"--spoil", &options.spoil}};
  for (int i = 1; i + 1 < argc; i += 2) {
    if (const auto found = numbers.find(argv[i]); found != numbers.end())
      *found->second = std::stoi(argv[i + 1]);
    else if (argv[i] == std::string("--sizes"))
      options.sizes = parse_sizes(argv[i + 1]);
    else
      throw std::invalid_argument(std::string("there is no option ") + argv[i]);
  }
  const auto grain = static_cast<std::size_t>(options.ranks) * sizeof(float);
  const bool are_right =
      std::all_of(options.sizes.begin(), options.sizes.end(),
                  [&](std::size_t size) { return size > 0 && size % grain == 0; });
  if (argc % 2 == 0 || options.ranks < 2 || options.ranks > cuda::kMaxRanks || options.rounds < 1 ||
      options.sizes.empty() || !are_right)
    throw std::invalid_argument(
        "--ranks is 2 to 32, --rounds 1 or more, --sizes are multiples of 4 bytes for each rank");
  return options;
}

int run_all(const Options& options) {
  return run_ranks(options.ranks, std::chrono::seconds(options.limit_s),
                   [&](int rank, Page& page) { return Sweep(rank, page, options).run(); });
}

}  // namespace
}  // namespace ringcomm::benchmarks

int main(int argc, char** argv) {
  try {
    return ringcomm::benchmarks::run_all(ringcomm::benchmarks::parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kernel_sweep: %s\n%s\n", error.what(), ringcomm::benchmarks::kUsage);
    return 2;
  }
}
