// Sizes of calls. Shards that differ: results, bytes, and sizes that do not fit each other. More
// than 2^31 elements in little memory: address space in which one MiB of pages is mapped
// repeatedly. The last part has its own pages, which show whether it was reached.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "collective_case.h"
#include "core/chunk_layout.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"
#include "transport/shm/context.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;

const std::vector<OpKind> kUneven = {OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kGather,
                                     OpKind::kScatter, OpKind::kAllToAll};

// Shards with no, some and many pieces in one call, before and after calls of one size, which check
// the state of the boards. In short: test_collectives.cc.
TEST_CASE("uneven shards in several pieces" * doctest::skip(testing::kHasThreadSanitizer)) {
  run_ranks(3, [&](Communicator& communicator) {
    for (const OpKind op : kUneven)
      testing::run_cases(communicator, {.counts = {kPhaseBytes},
                                        .ops = {op},
                                        .dtypes = {DType::kBFloat16},
                                        .in_place = {false},
                                        .uneven = {true, false, true}});
  });
}

// A peer that sends less in all has fewer pieces, and so longer slices of its shard.
TEST_CASE("uneven shards in place: ranks with one, two and many pieces" *
          doctest::skip(testing::kHasThreadSanitizer)) {
  static constexpr std::size_t kRoomElems = (kPhaseBytes - kLineBytes) / sizeof(std::int32_t);
  static std::size_t large_elems;  // of ranks 0 and 2; rank 1 has a fifth of a piece for each
  run_ranks(3, [&](Communicator& communicator) {
    std::uint32_t salt = 0;
    for (const std::size_t elems : {std::size_t{1000}, kRoomElems - kRoomElems / 5 - 1,
                                    kRoomElems - kRoomElems / 5, kRoomElems, 5 * kRoomElems + 3}) {
      if (communicator.rank() == 0) large_elems = elems;
      testing::barrier(communicator);
      run_case(communicator, {.op = OpKind::kAllToAll,
                              .dtype = DType::kInt32,
                              .is_in_place = true,
                              .salt = ++salt,
                              .is_uneven = true,
                              .elems_of = [](int from, int to) {
                                return from == 0 && to == 2 ? large_elems : kRoomElems / 5;
                              }});
      testing::barrier(communicator);
    }
  });
}

// With sizes of 1 to 64 bytes the time depended on the number of ranks in surprising ways:
// https://github.com/pmodels/mpich/issues/2530.
TEST_CASE("even and uneven shards of many ranks" * doctest::skip(testing::kHasThreadSanitizer)) {
  run_ranks(24, [&](Communicator& communicator) {
    testing::run_cases(communicator, {.counts = {1, 17, 40'000},
                                      .ops = {OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll},
                                      .in_place = {},
                                      .uneven = {false, true}});
  });
}

TEST_CASE("uneven shards are counted, whatever their size") {
  run_ranks(3, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    const Case c{.op = OpKind::kAllToAll, .num_elems = 1000, .salt = 5, .is_uneven = true};
    run_case(communicator, c);
    std::size_t sent = 0;
    std::size_t received = 0;
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == rank) continue;
      sent += testing::shard_elems(c, rank, peer) * sizeof(float);
      received += testing::shard_elems(c, peer, rank) * sizeof(float);
    }
    const std::size_t own = testing::shard_elems(c, rank, rank) * sizeof(float);
    const Stats::Counts counts = communicator.stats().counts(c.op, Algorithm::kDirect);
    expect(counts.sent_bytes == sent, "the bytes that peers read");
    expect(counts.copied_bytes == sent + received + own, "the bytes that this rank copied");
  });
}

// ---- how many phases a call takes

constexpr std::size_t kSmallBoardBytes = std::size_t{64} << 10;
constexpr int kManyRanks = 16;

struct Pattern {
  const char* name;
  std::size_t (*elems_of)(int from, int to);
};
constexpr Pattern kPatterns[] = {
    {"nothing", [](int, int) { return std::size_t{0}; }},
    {"one long", [](int from, int to) { return from + to == 3 ? std::size_t{1} << 20 : 0; }},
    {"one long, others short",
     [](int from, int to) { return from == 0 && to == 3 ? std::size_t{1} << 20 : 60U + to; }},
    {"two long, one of medium size",
     [](int, int to) {
       return std::size_t{to < 2 ? 300'000U : to == 2 ? 5'000U : 0U};
     }},
    {"equal but for one",
     [](int from, int to) { return std::size_t{from == 1 && to == 2 ? 9'999U : 10'000U}; }},
};

// A region is filled as long as its rank has anything to send: the phases are those of the rank
// with the most bytes, and an eighth.
void expect_few_phases(OpKind op, const Pattern& pattern, int rank, host::Group& group,
                       ShmContext& context) {
  const Case c{.op = op,
               .dtype = DType::kUint8,
               .root = rooted(op) ? 0 : -1,
               .salt = 4,
               .is_uneven = true,
               .elems_of = pattern.elems_of};
  testing::CaseBuffers buffers(c, rank, kManyRanks);
  Collective call = buffers.call();
  call.set_number(0, kManyRanks);
  const auto num_published = [&] {
    const BoardGeometry board = group.board();
    return std::max(board.cursor(rank, rank, 0).value, board.cursor(rank, rank, 1).value);
  };
  const std::uint64_t before = num_published();
  context.begin(call);
  alltoallv(context, call);
  buffers.check();
  std::size_t most = 0;
  for (int from = 0; from < kManyRanks; ++from) {
    std::size_t sum = 0;
    for (int to = 0; to < kManyRanks; ++to) {
      if (to == from || (op == OpKind::kScatter && from != 0)) continue;
      const std::size_t elems = testing::shard_elems(c, from, to);
      sum = op == OpKind::kGather || op == OpKind::kAllGather ? elems : sum + elems;
    }
    most = std::max(most, sum);
  }
  const std::uint64_t num_phases = num_published() - before;
  const std::size_t limit = 2 + most / kSmallBoardBytes * 9 / 8;
  expect(num_phases <= limit, std::string(name_of(op)) + ", " + pattern.name + ": at most " +
                                  std::to_string(limit) + " phases, not " +
                                  std::to_string(num_phases));
}

TEST_CASE("the phases of uneven shards are those of the rank with the most to send") {
  for (const OpKind op : kUneven) {
    testing::MemoryStore store;
    testing::run_threads(kManyRanks, [&](int rank) {
      const host::GroupTerms identity{.rank = rank, .world_size = kManyRanks, .options = "shards"};
      host::Group group = testing::make_group(
          store, identity, {.board_region_bytes = kSmallBoardBytes}, testing::kBound);
      host::GroupWait scope(group);
      scope.begin(kPatient);
      ShmContext context(group, scope, {.max_threads = 1});
      for (const Pattern& pattern : kPatterns) expect_few_phases(op, pattern, rank, group, context);
      const Collective last;
      context.begin(last);
      barrier(context, last);
    });
  }
}

// ---- sizes that do not fit

// A call of 3 ranks, given by its sizes in bytes.
struct Sizes {
  std::size_t num_elems = 0;
  std::vector<std::size_t> inputs = {};
  std::vector<std::size_t> outputs = {};
};

void run_sizes(Communicator& communicator, OpKind op, int root, const Sizes& sizes) {
  std::vector<std::vector<std::byte>> buffers(6, std::vector<std::byte>(100));
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (std::size_t i = 0; i < 3; ++i) {
    inputs.push_back(buffers[i].data());
    outputs.push_back(buffers[3 + i].data());
  }
  communicator.run({{.num_elems = sizes.num_elems,
                     .root = root,
                     .op = op,
                     .dtype = op == OpKind::kReduceScatter ? DType::kUint8 : DType::kByte},
                    inputs.data(),
                    outputs.data(),
                    sizes.inputs.empty() ? nullptr : sizes.inputs.data(),
                    sizes.outputs.empty() ? nullptr : sizes.outputs.data()},
                   kPatient);
}

// Every rank's error names both sizes and both ranks, and the group has ended.
void expect_misfit(OpKind op, int root, const std::vector<Sizes>& sizes,
                   const std::vector<std::string>& texts) {
  run_ranks(3, [&](Communicator& communicator) {
    testing::barrier(communicator);
    const auto rank = static_cast<std::size_t>(communicator.rank());
    for (int turn = 0; turn < 2; ++turn)
      testing::expect_error(
          testing::error_of([&] { run_sizes(communicator, op, root, sizes[rank]); }),
          ErrorKind::kMismatch, texts);
  });
}

TEST_CASE("sizes that do not fit are an error on every rank, which names both") {
  const Sizes even{.num_elems = 4};
  expect_misfit(OpKind::kAllToAll, -1,
                {{.inputs = {1, 2, 3}, .outputs = {1, 2, 3}},
                 {.inputs = {2, 0, 5}, .outputs = {2, 0, 6}},
                 {.inputs = {3, 6, 1}, .outputs = {3, 4, 1}}},
                {"rank 1 has 5 bytes for rank 2, which expects 4 bytes", "all_to_all"});
  expect_misfit(OpKind::kAllToAll, -1, {even, even, {.inputs = {4, 4, 4}, .outputs = {3, 4, 4}}},
                {"rank 0 has 4 bytes for rank 2, which expects 3 bytes"});
  expect_misfit(OpKind::kAllToAll, -1, {even, even, {.num_elems = 5}},
                {"rank 0 has 4 bytes for rank 2, which expects 5 bytes"});
  expect_misfit(OpKind::kAllGather, -1,
                {{.num_elems = 4, .outputs = {4, 5, 6}},
                 {.num_elems = 5, .outputs = {4, 5, 6}},
                 {.num_elems = 7, .outputs = {4, 5, 7}}},
                {"rank 2 has 7 bytes for rank 0, which expects 6 bytes"});
  expect_misfit(OpKind::kAllGather, -1, {even, even, {.num_elems = 4, .outputs = {4, 9, 4}}},
                {"rank 1 has 4 bytes for rank 2, which expects 9 bytes"});
  expect_misfit(OpKind::kReduceScatter, -1,
                {{.num_elems = 4, .inputs = {4, 5, 6}},
                 {.num_elems = 5, .inputs = {4, 5, 5}},
                 {.num_elems = 6, .inputs = {4, 5, 6}}},
                {"rank 1 has 5 bytes for rank 2, which expects 6 bytes", "uint8"});
  expect_misfit(OpKind::kReduceScatter, -1, {even, {.num_elems = 4, .inputs = {4, 4, 5}}, even},
                {"rank 1 has 5 bytes for rank 2, which expects 4 bytes"});
  expect_misfit(OpKind::kGather, 1,
                {even, {.num_elems = 4, .outputs = {4, 4, 4}}, {.num_elems = 7}},
                {"rank 2 has 7 bytes for rank 1, which expects 4 bytes", "root 1"});
  expect_misfit(OpKind::kScatter, 0,
                {{.num_elems = 4, .inputs = {4, 2, 3}}, even, {.num_elems = 3}},
                {"rank 0 has 2 bytes for rank 1, which expects 4 bytes"});
}

TEST_CASE("a rank's shard for itself has one size, or the call fails at once") {
  for (const int world_size : {1, 3}) {
    run_ranks(world_size, [&](Communicator& communicator) {
      const Sizes wrong{.num_elems = 4, .inputs = {5, 5, 5}};
      for (const OpKind op : {OpKind::kReduceScatter, OpKind::kScatter, OpKind::kAllToAll})
        testing::expect_throws<std::invalid_argument>(
            [&] { run_sizes(communicator, op, rooted(op) ? 0 : -1, wrong); },
            {"own input shard has 5 bytes and its own output shard 4"});
      run_case(communicator, {.num_elems = 9});
    });
  }
}

// One rank's sizes are all equal and the others' are not; all_to_all allows both together.
TEST_CASE("even and uneven ranks in one all_to_all") {
  run_ranks(3, [&](Communicator& communicator) {
    const std::vector<Sizes> sizes = {{.num_elems = 4},
                                      {.inputs = {4, 9, 1}, .outputs = {4, 9, 2}},
                                      {.inputs = {4, 2, 0}, .outputs = {4, 1, 0}}};
    for (int turn = 0; turn < 3; ++turn)
      run_sizes(communicator, OpKind::kAllToAll, -1,
                sizes[static_cast<std::size_t>(communicator.rank())]);
  });
}

constexpr std::size_t kMib = std::size_t{1} << 20;

// ---- the arithmetic alone

constexpr std::size_t kHuge = (std::size_t{5} << 32) + 3;  // elements
constexpr ChunkLayout kLayout(kHuge, 3);
static_assert(kLayout.chunk(2).end_elems() == kHuge);
static_assert(kLayout.chunk(1).begin_elems == kLayout.chunk(0).num_elems);
static_assert(num_slices(kHuge, kMib) == (std::size_t{5} << 12) + 1);
static_assert(slice_of({0, kHuge}, std::size_t{5} << 12, kMib) ==
              ElemRange{std::size_t{5} << 32, 3});
static_assert(slice_of({kHuge, kHuge}, std::size_t{3} << 12, kMib).begin_elems ==
              kHuge + (std::size_t{3} << 32));

// ---- calls

class RepeatedMemory {
 public:
  explicit RepeatedMemory(std::size_t num_bytes) : num_bytes_(num_bytes / kMib * kMib + kMib) {
    fd_ = ::memfd_create("repeated", 0);
    if (fd_ < 0 || ::ftruncate(fd_, 2 * kMib) != 0) throw std::runtime_error("memfd_create");
    // A place for all, and then the pages.
    void* place =
        ::mmap(nullptr, num_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) throw std::runtime_error("mmap");
    begin_ = static_cast<std::byte*>(place);
    for (std::size_t offset = 0; offset < num_bytes_; offset += kMib) {
      const bool is_last = offset + kMib == num_bytes_;
      if (::mmap(begin_ + offset, kMib, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_,
                 is_last ? static_cast<off_t>(kMib) : 0) == MAP_FAILED)
        throw std::runtime_error("mmap of a page");
    }
  }
  ~RepeatedMemory() {
    ::munmap(begin_, num_bytes_);
    ::close(fd_);
  }
  RepeatedMemory(const RepeatedMemory&) = delete;
  RepeatedMemory& operator=(const RepeatedMemory&) = delete;

  std::byte* data() { return begin_; }
  std::byte* last() { return begin_ + num_bytes_ - kMib; }

 private:
  std::size_t num_bytes_;
  int fd_ = -1;
  std::byte* begin_ = nullptr;
};

// The sanitizers' own memory grows with the address space that is touched.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST_CASE("2^31 elements and some more reach their last place") {
  constexpr std::size_t kElems = (std::size_t{1} << 31) + 5;
  for (const OpKind op : {OpKind::kBroadcast, OpKind::kAllToAll}) {
    testing::run_ranks(2, [&](Communicator& communicator) {
      const bool is_source = communicator.rank() == 0;
      RepeatedMemory memory(kElems);
      std::memset(memory.data(), is_source ? 1 : 0, kMib);
      std::memset(memory.last(), is_source ? 2 : 0, kMib);
      // An all_to_all with all data from rank 0 to rank 1.
      const std::vector<std::size_t> given = {0, is_source ? kElems : 0};
      const std::vector<std::size_t> taken = {is_source ? 0 : kElems, 0};
      const void* inputs[] = {memory.data(), memory.data()};
      void* outputs[] = {memory.data(), memory.data()};
      const bool is_uneven = op == OpKind::kAllToAll;
      communicator.run({{.num_elems = is_uneven ? 0 : kElems, .root = is_uneven ? -1 : 0, .op = op},
                        inputs,
                        outputs,
                        is_uneven ? given.data() : nullptr,
                        is_uneven ? taken.data() : nullptr},
                       testing::kPatient);
      expect(memory.data()[kMib - 1] == std::byte{1}, "the first MiB");
      expect(memory.last()[4] == std::byte{2}, "the last element");
      expect(memory.last()[5] == (is_source ? std::byte{2} : std::byte{0}), "nothing behind it");
    });
  }
}
#endif

}  // namespace
