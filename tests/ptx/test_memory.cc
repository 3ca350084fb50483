// Collectives by nvcc's PTX that mutants_memory.py runs on the weak memory: small, with enough
// phases that each region, slot and packet is used again. They pass on any memory.
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

#include "gpu_ranks.h"
#include "loss_case.h"
#include "ptx/weak_memory.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;

/// A kernel that waits for what it will never see ends after this.
std::chrono::seconds timeout() {
  const char* const text = std::getenv("RINGCOMM_TEST_PTX_TIMEOUT_S");
  return std::chrono::seconds(text == nullptr ? 50 : std::atoi(text));
}

constexpr int kNumCalls = 3;

void run_calls(int world_size, const Case& c, bool lends = false) {
  GpuRanks ranks(world_size, {.world_size = world_size, .min_multiprocessors = 2}, 1);
  ranks.timeout = timeout();
  ptx::weak::forget_stores();
  run_threads(world_size, [&](int rank) {
    // Others wait long enough to ask whether to go on.
    if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    for (int call = 0; call < kNumCalls; ++call) {
      Case again = c;
      again.salt = c.salt + static_cast<std::uint32_t>(call);
      ranks.run_case(rank, again, lends);
    }
  });
}

TEST_CASE("memory: one_shot") {
  run_calls(2, {.dtype = DType::kBFloat16, .algorithm = Algorithm::kOneShot, .num_elems = 1021});
  run_calls(3, {.dtype = DType::kBFloat16, .algorithm = Algorithm::kOneShot, .num_elems = 77});
}

TEST_CASE("memory: two_rounds") {
  run_calls(2, {.dtype = DType::kBFloat16, .algorithm = Algorithm::kTwoShot, .num_elems = 701});
  run_calls(3, {.dtype = DType::kBFloat16, .algorithm = Algorithm::kTwoShot, .num_elems = 333});
}

TEST_CASE("memory: reduce_packets") {
  run_calls(3, {.op = OpKind::kReduceScatter, .dtype = DType::kBFloat16, .num_elems = 301});
}

TEST_CASE("memory: move_packets") {
  run_calls(3, {.op = OpKind::kAllGather, .dtype = DType::kByte, .num_elems = 501});
}

TEST_CASE("memory: in place") {
  for (const bool lends : {false, true})
    run_calls(2, {.dtype = DType::kBFloat16, .algorithm = Algorithm::kTwoShot, .num_elems = 40'001},
              lends);
  run_calls(3, {.dtype = DType::kBFloat16, .algorithm = Algorithm::kTwoShot, .num_elems = 20'001},
            true);
}

TEST_CASE("memory: move in place") {
  for (const bool lends : {false, true})
    run_calls(3, {.op = OpKind::kAllGather, .dtype = DType::kByte, .num_elems = 50'001}, lends);
}

TEST_CASE("memory: ring") {
  // Several slices for each block: the last slot of one is filled again in the next one.
  run_calls(3, {.dtype = DType::kBFloat16, .algorithm = Algorithm::kRing, .num_elems = 160'001});
}

TEST_CASE("memory: shards") {
  for (const bool lends : {false, true})
    run_calls(3, {.op = OpKind::kAllToAll, .dtype = DType::kByte, .num_elems = 30'001}, lends);
  run_calls(3, {.op = OpKind::kScatter, .dtype = DType::kByte, .root = 1, .num_elems = 30'001},
            true);
}

TEST_CASE("memory: exchange") {
  constexpr std::size_t kBytes = 60'001;  // several times the slots of a link
  GpuRanks ranks(2, {.world_size = 2, .min_multiprocessors = 4}, 1);
  ranks.timeout = timeout();
  ptx::weak::forget_stores();
  run_threads(2, [&](int rank) {
    for (int call = 0; call < 2 * kNumCalls; ++call) {
      const bool lends = call % 2 == 0;
      // One way, a sender that does not lend waits for slots.
      const bool sends = call / 2 == 2 || call / 2 == rank, receives = call / 2 == 2 || !sends;
      std::vector<std::byte> sent(kBytes), received(kBytes), expected(kBytes);
      for (std::size_t i = 0; i < kBytes; ++i) {
        const auto byte_of = [&](int from) {
          return static_cast<std::byte>(i * 31 + i / 251 + static_cast<std::size_t>(call + from));
        };
        sent[i] = byte_of(rank);
        expected[i] = byte_of(1 - rank);
      }
      const auto peer = static_cast<std::int16_t>(1 - rank);
      std::vector<cuda::P2pMessage> messages;
      if (sends) messages.push_back({sent.data(), kBytes, 0, peer, true});
      if (receives) messages.push_back({received.data(), kBytes, 0, peer, false});
      ranks.exchange(rank, messages, lends);
      expect(ranks.control(rank).stop == 0, "a kernel that does not fail");
      expect(!receives || received == expected, "the peer's message");
    }
  });
}

TEST_CASE("memory: loss_rows") {
  // More rows than slots, each over two blocks, with edges in the middle of vectors.
  for (const unsigned cluster_blocks : {1u, 2u}) {
    LossCase c({.width = 1027, .num_tokens = 7, .cluster_blocks = cluster_blocks});
    c.run();
    c.check();
  }
}

}  // namespace
