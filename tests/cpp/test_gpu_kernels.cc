// Collectives by the kernels of GPUs, on threads: every op, type, reduction and algorithm against
// the oracle, with few blocks and small staging, so that pieces follow each other.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <latch>
#include <vector>

#include "gpu_ranks.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;

// As on a GPU of so many multiprocessors for each rank.
cuda::DeviceFacts facts_of(int world_size, int num_multiprocessors) {
  return {.world_size = world_size, .min_multiprocessors = num_multiprocessors};
}

void run_cases(int world_size, int num_multiprocessors, unsigned num_threads,
               const std::vector<CaseTable>& tables, bool lends = false) {
  GpuRanks ranks(world_size, facts_of(world_size, num_multiprocessors), num_threads);
  run_threads(world_size, [&](int rank) {
    for (const CaseTable& table : tables)
      for (const Case& c : table.of(world_size)) ranks.run_case(rank, c, lends);
  });
}

const std::vector<OpKind> kReducing = {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter};
const std::vector<OpKind> kMoving = {OpKind::kAllGather, OpKind::kBroadcast, OpKind::kGather,
                                     OpKind::kScatter, OpKind::kAllToAll};

// Of ops that move data, by bytes.
std::vector<CaseTable> every_op(const std::vector<std::size_t>& counts,
                                const std::vector<bool>& in_place = {}) {
  return {{.counts = counts, .ops = kReducing, .in_place = in_place},
          {.counts = counts, .ops = kMoving, .dtypes = {DType::kByte}, .in_place = in_place}};
}

TEST_CASE("kernels: every op moves or reduces what the oracle says") {
  const std::vector<std::size_t> counts =
      kHasThreadSanitizer ? std::vector<std::size_t>{0, 5, 9000}
                          : std::vector<std::size_t>{0, 1, 3, 517, 4096, 40'000};
  for (const int world_size : {2, 3, 4})
    run_cases(world_size, 2, 1, every_op(counts, {false, true}));
}

TEST_CASE("kernels: shards of different sizes") {
  for (const int world_size : {2, 4})
    run_cases(world_size, 3, 1,
              {{.counts = {3, 4, 5, 15'000, 15'001},
                .ops = {OpKind::kReduceScatter},
                .dtypes = {DType::kBFloat16},
                .in_place = {false},
                .uneven = {true}},
               {.counts = {3, 4, 5, 15'000, 15'001},
                .ops = kMoving,
                .dtypes = {DType::kByte},
                .in_place = {false},
                .uneven = {true}}});
}

TEST_CASE("kernels: every type, reduction and algorithm of all_reduce") {
  std::vector<DType> dtypes = all_of<DType>(kNumDTypes);
  std::erase(dtypes, DType::kSoftmaxStats);  // these are merged by torch's operators there
  run_cases(3, 2, 1,
            {{.counts = {331},
              .ops = {OpKind::kAllReduce},
              .algorithms = kAlgorithms,
              .dtypes = dtypes,
              .reductions = all_of<Reduction>(kNumReductions),
              .in_place = {}}});
}

TEST_CASE("kernels: threads of a block, and blocks, share the work of every algorithm") {
  run_cases(2, 3, 4,
            {{.counts = {100, 20'011},
              .ops = {OpKind::kAllReduce},
              .algorithms = kAlgorithms,
              .dtypes = {DType::kFloat32, DType::kFloat16, DType::kInt64},
              .in_place = {}},
             {.counts = {70'000},
              .ops = {OpKind::kAllToAll},
              .dtypes = {DType::kByte},
              .in_place = {false}}});
}

TEST_CASE("kernels: any number of ranks, of vectors at once, and elements that fill none") {
  for (const int world_size : {1, 2, 4, 5, 8, 9})
    run_cases(world_size, 2, kHasThreadSanitizer ? 2 : 3,
              {{.counts = {77, 13'001},
                .ops = {OpKind::kAllReduce, OpKind::kReduceScatter},
                .algorithms = {Algorithm::kTwoShot},
                .dtypes = {DType::kBFloat16, DType::kFloat32},
                .reductions = {Reduction::kSum, Reduction::kAvg, Reduction::kMax},
                .in_place = {}}});
}

// The first of two ranks makes `first`, and the other one `second`: both stop with the other's
// header.
void meet_another_call(const Case& first, const Case& second, bool lends) {
  CAPTURE(first.to_text());
  GpuRanks ranks(2, facts_of(2, lends ? 3 : 2), 2);
  run_threads(2, [&](int rank) {
    CaseBuffers buffers(rank == 0 ? first : second, rank, 2);
    const oracle::Bytes before = buffers.result();
    ranks.run(rank, buffers.call(), lends);
    const cuda::Control& control = ranks.control(rank);
    expect(control.stop == cuda::kMismatch && control.peer == 1 - rank, "a mismatch");
    const CallHeader theirs = cuda::from_words(control.theirs);
    expect(theirs.dtype == (rank == 0 ? second : first).dtype, "the other's header");
    expect(buffers.result() == before, "an output that nothing was written to");
  });
}

TEST_CASE("kernels: a different call is reported to the host with both headers") {
  for (const Algorithm algorithm : kAlgorithms) {
    const Case c{.algorithm = algorithm, .num_elems = 500, .salt = 2};
    Case other = c;
    other.dtype = DType::kInt32;
    meet_another_call(c, other, false);
    // Packets, also with data of different lengths, so that some never arrives.
    if (algorithm == Algorithm::kOneShot) other.num_elems = 3;
    meet_another_call(c, other, false);
  }
  // Of lent buffers none is accessed before.
  const Case c{.op = OpKind::kReduceScatter, .num_elems = 42'500, .salt = 2};
  Case other = c;
  other.dtype = DType::kInt32;
  meet_another_call(c, other, true);
}

TEST_CASE("kernels: a rank that does not arrive is a timeout that names it, in all algorithms") {
  std::vector<Case> cases = {{.op = OpKind::kReduceScatter, .num_elems = 42'500},
                             {.op = OpKind::kAllGather, .num_elems = 42'500}};
  for (const Algorithm algorithm : kAlgorithms)
    cases.push_back({.algorithm = algorithm, .num_elems = 9000});
  for (const Case& c : cases) {
    const bool lends = c.op != OpKind::kAllReduce;
    GpuRanks ranks(3, facts_of(3, lends ? 3 : 2), 2);
    ranks.timeout = std::chrono::seconds(1);
    std::latch start(2);  // of the two that do arrive none is late
    run_threads(2, [&](int rank) {
      CaseBuffers buffers(c, rank, 3);
      start.arrive_and_wait();
      ranks.run(rank, buffers.call(), lends);
      expect(ranks.control(rank).stop == static_cast<std::uint32_t>(WaitStatus::kTimeout),
             "a time-out");
      expect(ranks.control(rank).peer == 2, "the rank that is missing");
    });
  }
}

// Messages of every rank to every other, two of each pair and direction.
struct Letters {
  Letters(int rank, int world_size, std::size_t long_bytes) {
    const std::size_t sizes[] = {long_bytes, 5};
    for (int peer = 0; peer < world_size; ++peer)
      for (std::size_t i = 0; i < 2 && peer != rank; ++i) {
        sent.push_back(letter(rank, peer, i, sizes[i]));
        expected.push_back(letter(peer, rank, i, sizes[i]));
        received.emplace_back(sizes[i]);
        peers.push_back(peer);
      }
  }
  static std::vector<std::byte> letter(int from, int to, std::size_t number, std::size_t size) {
    std::vector<std::byte> bytes(size);
    for (std::size_t i = 0; i < size; ++i)
      bytes[i] =
          static_cast<std::byte>(i * 7 + number * 31 + static_cast<std::size_t>(from * 5 + to));
    return bytes;
  }
  cuda::P2pMessage message(std::size_t i, bool is_send) {
    std::vector<std::byte>& bytes = is_send ? sent[i] : received[i];
    return {bytes.data(), bytes.size(), static_cast<std::int32_t>(i % 2),
            static_cast<std::int16_t>(peers[i]), is_send};
  }

  std::vector<std::vector<std::byte>> sent, received, expected;
  std::vector<int> peers;
};

TEST_CASE("kernels: a batch of messages, several of a pair, to ranks that take them one by one") {
  for (const int world_size : {2, 3}) {
    GpuRanks ranks(world_size, facts_of(world_size, 4 * world_size), 2);
    run_threads(world_size, [&](int rank) {
      for (const bool is_lone : {false, true}) {
        Letters letters(rank, world_size, kHasThreadSanitizer ? 40'000 : 300'001);
        std::vector<cuda::P2pMessage> batch;
        for (const bool is_send : {false, true})
          for (std::size_t i = 0; i < letters.peers.size(); ++i)
            batch.push_back(letters.message(i, is_send));
        // The last rank receives all before it sends any: the others must not wait for that.
        if (is_lone && rank == world_size - 1)
          for (const cuda::P2pMessage& message : batch) ranks.exchange(rank, {message});
        else
          ranks.exchange(rank, batch);
        expect(ranks.control(rank).stop == 0, "a kernel that does not fail");
        expect(letters.received == letters.expected, "all messages");
      }
    });
  }
}

TEST_CASE("kernels: a message of another size or tag is reported to the receiver's host") {
  for (const std::int32_t tag : {0, 7}) {
    GpuRanks ranks(2, facts_of(2, 4), 2);
    std::vector<std::byte> bytes(100);
    const std::uint64_t expected_bytes = tag == 0 ? 99 : 100;
    run_threads(2, [&](int rank) {
      if (rank == 0)
        ranks.exchange(0, {{bytes.data(), 100, tag, 1, true}});
      else
        ranks.exchange(1, {{bytes.data(), expected_bytes, 0, 0, false}});
    });
    CHECK(ranks.control(0).stop == 0);
    CHECK(ranks.control(1).stop == cuda::kP2pDiffers);
    CHECK(ranks.control(1).peer == 0);
    CHECK(ranks.control(1).theirs[0] == 100);
    CHECK(ranks.control(1).theirs[4] == static_cast<std::uint32_t>(tag));
  }
}

// Rank 0 times out in a call and makes another one before its host could tell rank 1, which arrives
// late, before the other call or after it. Rank 1 must not take the other call's data for the
// first's.
template <class FirstOfRank0, class SecondOfRank0, class FirstOfRank1>
bool fails_on_late_rank(GpuRanks& ranks, bool is_after, const FirstOfRank0& first,
                        const SecondOfRank0& second, const FirstOfRank1& late) {
  ranks.timeout = std::chrono::milliseconds(200);
  first();
  CHECK(ranks.control(0).stop == static_cast<std::uint32_t>(WaitStatus::kTimeout));
  if (is_after) second();
  std::atomic<bool> has_ended = false;
  std::thread rank_1([&] { late(), has_ended = true; });
  while (__atomic_load_n(&ranks.control(1).asked_at, __ATOMIC_RELAXED) == 0 && !has_ended)
    std::this_thread::yield();
  if (!is_after) second();
  rank_1.join();
  CHECK(ranks.control(0).stop == static_cast<std::uint32_t>(WaitStatus::kTimeout));
  return ranks.control(1).stop == static_cast<std::uint32_t>(WaitStatus::kTimeout);
}

TEST_CASE("kernels: after a kernel has failed, a late peer gets no data of the rank's next one") {
  const Case cases[] = {{.algorithm = Algorithm::kOneShot, .num_elems = 300},
                        {.algorithm = Algorithm::kTwoShot, .num_elems = 500},
                        {.algorithm = Algorithm::kRing, .num_elems = 9000},
                        {.op = OpKind::kReduceScatter, .num_elems = 20'000},
                        {.op = OpKind::kAllGather, .dtype = DType::kByte, .num_elems = 99'000}};
  for (const bool is_after : {false, true}) {
    CAPTURE(is_after);
    for (const Case& c : cases) {
      CAPTURE(c.to_text());
      Case other = c;
      other.salt = 7;
      CaseBuffers mine(c, 0, 2), next(other, 0, 2), late(c, 1, 2);
      GpuRanks ranks(2, facts_of(2, 2), 2);
      const auto run = [&](int rank, CaseBuffers& buffers) { ranks.run(rank, buffers.call()); };
      if (!fails_on_late_rank(
              ranks, is_after, [&] { run(0, mine); }, [&] { run(0, next); }, [&] { run(1, late); }))
        late.check();
    }
    std::vector<std::byte> sent(300'001), other(300'001, std::byte{9}), received(300'001);
    GpuRanks ranks(2, facts_of(2, 8), 2);
    const auto exchange = [&](int rank, std::vector<std::byte>& bytes) {
      ranks.exchange(
          rank, {{bytes.data(), bytes.size(), 0, static_cast<std::int16_t>(1 - rank), rank == 0}});
    };
    if (!fails_on_late_rank(
            ranks, is_after, [&] { exchange(0, sent); }, [&] { exchange(0, other); },
            [&] { exchange(1, received); }))
      CHECK(received == sent);
  }
}

// Makes groups of each size on a GPU until there is no room for a block of each.
TEST_CASE("kernels: the blocks that wait of any number of groups fit a GPU") {
  for (const int num_sms : {20, 132})
    for (int sharing = 1; sharing <= 8; ++sharing) {
      CAPTURE(sharing);
      cuda::DeviceFacts facts{.world_size = std::max(2, sharing),
                              .max_ranks_per_device = sharing,
                              .min_multiprocessors = num_sms};
      const int share = cuda::share_of_waiting_blocks(num_sms, sharing);
      facts.free_blocks = share;
      int num_taken = 0, num_groups = 0;
      for (; facts.free_blocks >= -share; ++num_groups) {
        const int num_blocks = cuda::waiting_blocks_of_group(facts);
        CHECK(num_blocks >= 1);
        facts.free_blocks -= num_blocks;
        num_taken += num_blocks;
      }
      CHECK(num_groups >= share);
      CHECK((num_taken - 1) * sharing <= 2 * num_sms);
    }
  for (const int sharing : {2, 8, 11})
    CHECK(cuda::has_room_for_messages(
        {.world_size = sharing, .max_ranks_per_device = sharing, .min_multiprocessors = 132}));
  CHECK(!cuda::has_room_for_messages(
      {.world_size = 16, .max_ranks_per_device = 16, .min_multiprocessors = 132}));
}

// Two steps of a kernel on one rank's arrays, and of the host's.
void update_alone(Optimizer optimizer, std::size_t num_elems) {
  std::vector<float> start(num_elems), grad(num_elems);
  for (std::size_t i = 0; i < num_elems; ++i) {
    start[i] = 0.37F * static_cast<float>(i % 91) - 11;
    grad[i] = 0.013F * static_cast<float>(i % 83) - 0.5F;
  }
  struct Arrays {
    std::vector<float> param, first, second;
  };
  const std::vector<float> zeros(num_elems);
  Arrays kernel{start, zeros, zeros}, host{start, zeros, zeros};
  for (std::uint32_t step = 1; step <= 2; ++step) {
    Collective call{{.op = OpKind::kReduceUpdateGather,
                     .dtype = DType::kFloat32,
                     .has_update = true,
                     .update = {.lr = 0.01, .weight_decay = 0.1, .step = step}}};
    call.update.optimizer = optimizer;
    call.update.coefficients =
        optimizer == Optimizer::kAdamW ? std::array{0.9, 0.999, 1e-8} : std::array{0.75, 0.0, 0.0};
    const UpdateOp op = make_update_op(call.update, DType::kFloat32);
    const int num_states = ringcomm::num_states(call.update);
    const auto states = [&](Arrays& of) {
      return std::array{num_states > 0 ? of.first.data() : nullptr,
                        num_states > 1 ? of.second.data() : nullptr};
    };
    op.apply(op.scalars, {host.param.data(), grad.data(), nullptr, states(host)}, num_elems);
    call.states = states(kernel);
    cuda::KernelCall kernel_call;
    const cuda::LaunchPlan plan =
        cuda::plan_own_update(call, grad.data(), kernel.param.data(), num_elems, kernel_call);
    run_kernel(plan.kernel, kernel_call, plan.num_blocks, 3);
  }
  CHECK(std::memcmp(kernel.param.data(), host.param.data(), num_elems * sizeof(float)) == 0);
  CHECK(kernel.first == host.first);
  CHECK(kernel.second == host.second);
}

TEST_CASE("kernels: an update alone has the host's bits") {
  for (const Optimizer optimizer : {Optimizer::kSgd, Optimizer::kAdamW, Optimizer::kLomo})
    for (const std::size_t num_elems : {1, 1003, 20'000}) update_alone(optimizer, num_elems);
}

TEST_CASE("kernels: the host's abort word ends their waits") {
  GpuRanks ranks(2, facts_of(2, 2), 2);
  std::thread host([&] {
    while (__atomic_load_n(&ranks.control(0).asked_at, __ATOMIC_RELAXED) == 0)
      std::this_thread::yield();
    __atomic_store_n(&ranks.control(0).abort, 1u, __ATOMIC_RELEASE);
  });
  const Case c{.algorithm = Algorithm::kTwoShot, .num_elems = 9000};
  CaseBuffers buffers(c, 0, 2);
  ranks.run(0, buffers.call());
  host.join();
  CHECK(ranks.control(0).stop == 0);
  CHECK(ranks.control(0).awaited_peer == 1);
}

TEST_CASE("kernels: staging has packets for 1 MiB in two rounds, and scratch memory as there is") {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  for (int world_size = 2; world_size <= cuda::kMaxRanks; ++world_size) {
    CAPTURE(world_size);
    cuda::DeviceFacts facts{.world_size = world_size,
                            .max_ranks_per_device = world_size,
                            .min_multiprocessors = 132,
                            .free_bytes = 140'000 * kMiB};
    const cuda::StagingLayout layout = cuda::make_staging_layout(facts);
    const std::size_t num_packets = layout.packets_per_block - cuda::kHeaderPackets;
    CHECK(num_packets % 2 == 0);
    CHECK(num_packets * layout.num_blocks * layout.world_size * 8 >= 2 * kMiB - 8 * 64);
    CHECK(layout.scratch_offset() <= 20 * kMiB);
    CHECK(layout.scratch_bytes ==
          std::min<std::size_t>(140'000 / 64 / layout.world_size / 2 * 2, 64) * kMiB);
    facts.free_bytes = 0;
    CHECK(cuda::make_staging_layout(facts).scratch_bytes == 2 * kMiB);
  }
}

}  // namespace
