// Groups on GPUs over the emulator of CUDA's driver: staging, launches, streams, the watchdog.
// Ranks are threads here, and processes in tests/python.
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "collective_case.h"
#include "cuda/collectives/ipc_transport.h"
#include "cuda/driver/driver.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;

// Makes the emulator the driver of this process; call it before the first use of a driver.
void use_emulator() {
  static const bool is_done = [] {
    const std::string image = "/proc/self/fd/" + std::to_string([] {
                                const int fd = memfd_create("image", 0);
                                const std::string text = "RINGCOMM-EMULATED";
                                if (write(fd, text.data(), text.size()) < 0) std::abort();
                                return fd;
                              }());
    setenv("RINGCOMM_EMULATOR_BOX", std::to_string(getpid()).c_str(), 1);
    setenv("RINGCOMM_EMULATOR_MEMORY", std::to_string(std::uint64_t{64} << 30).c_str(), 1);
    setenv("RINGCOMM_CUDA_IMAGE", image.c_str(), 1);
    setenv("RINGCOMM_CUDA_DRIVER", RINGCOMM_EMULATOR, 1);
    return true;
  }();
  CHECK(is_done);
}

// A rank's stream, and what it needs to run a call to its end.
class Rank {
 public:
  Rank(Communicator& communicator, std::chrono::milliseconds timeout = std::chrono::seconds(50))
      : communicator_(communicator),
        guard_(0),
        transport_(std::make_unique<cuda::IpcTransport>(
            communicator, 0, WaitLimits{.timeout = timeout, .is_interrupted = {}},
            [](const std::string&) {}, [] { return nullptr; })) {
    cuda::check(cuda::driver().stream_create(&stream_, cuda::kStreamNonBlocking), "make a stream");
  }
  ~Rank() {
    transport_.reset();
    cuda::driver().stream_destroy(stream_);
  }

  void start(Collective call) {
    call.set_number(0, communicator_.world_size());
    transport_->plan(call, /*is_captured=*/false);
    transport_->enqueue(call, cuda::StreamContext::of(stream_));
  }
  void check_messages(const std::vector<cuda::P2pMessage>& messages) const {
    transport_->check_messages(messages);
  }
  void finish() { cuda::check(cuda::driver().stream_synchronize(stream_), "wait"); }
  void run_case(const Case& c) {
    CaseBuffers buffers(c, communicator_.rank(), communicator_.world_size());
    start(buffers.call());
    finish();
    communicator_.failure().rethrow_if_any();
    buffers.check();
  }
  /// Of the group, in which the watchdog finds the kernels'.
  Error failure() {
    wait_until([&] { return communicator_.failure().has_failed(); }, "the failure");
    return testing::error_of([&] { communicator_.failure().rethrow_if_any(); });
  }

 private:
  Communicator& communicator_;
  cuda::ContextGuard guard_;
  cuda::StreamHandle stream_ = nullptr;
  std::unique_ptr<cuda::IpcTransport> transport_;
};

TEST_CASE("gpu transport: every op on the emulated device") {
  use_emulator();
  run_ranks(2, [](Communicator& communicator) {
    Rank rank(communicator);
    for (const DType dtype : {DType::kFloat32, DType::kByte})
      for (const Case& c :
           CaseTable{.counts = {0, 77, 100'000}, .dtypes = {dtype}, .in_place = {false}}.of(2))
        if (reduces(c.op) == (dtype == DType::kFloat32)) rank.run_case(c);
  });
}

TEST_CASE("gpu transport: a batch of messages that is too large is refused") {
  use_emulator();
  run_ranks(2, [](Communicator& communicator) {
    const Rank rank(communicator);
    std::byte byte{};
    const std::vector<cuda::P2pMessage> messages(97, {&byte, 1, 0, 1, true});
    CHECK_THROWS_WITH(rank.check_messages(messages), doctest::Contains("at most 96, got 97"));
  });
}

// More shapes than plans are kept, again and again, so that plans are found, replaced and made
// anew.
TEST_CASE("gpu transport: all_reduces that come again use their plans with other buffers") {
  use_emulator();
  run_ranks(2, [](Communicator& communicator) {
    Rank rank(communicator);
    std::uint32_t salt = 0;
    for (int round = 0; round < 3; ++round)
      for (Case c : CaseTable{.counts = {1, 7, 49, 343, 2401, 16'807, 117'649},
                              .ops = {OpKind::kAllReduce},
                              .dtypes = {DType::kFloat32, DType::kInt64},
                              .reductions = {Reduction::kSum, Reduction::kMax},
                              .in_place = {false}}
                        .of(2)) {
        c.salt = ++salt;
        rank.run_case(c);
      }
  });
}

TEST_CASE("gpu transport: calls that take other ways through the kernels are a mismatch, on both") {
  use_emulator();
  run_ranks(2, [](Communicator& communicator) {
    Rank rank(communicator);
    const Case c{.num_elems = communicator.rank() == 0 ? std::size_t{10} : std::size_t{100'000}};
    CaseBuffers buffers(c, communicator.rank(), 2);
    rank.start(buffers.call());
    rank.finish();  // the kernels have failed
    expect_error(rank.failure(), ErrorKind::kMismatch, {"40 bytes", "400000 bytes"});
  });
}

TEST_CASE("gpu transport: a rank that does not come is a time-out that names it") {
  use_emulator();
  run_ranks(2, [](Communicator& communicator) {
    Rank rank(communicator, std::chrono::milliseconds(300));
    if (communicator.rank() == 0) {
      CaseBuffers buffers({.num_elems = 1000}, 0, 2);
      rank.start(buffers.call());
      rank.finish();
      const Error error = rank.failure();
      expect(error.info().kind == ErrorKind::kTimeout && error.info().rank == 1, error.what());
    }
    const GroupState& members = *communicator.group_state();
    wait_until([&] { return members.state_of(1 - communicator.rank()) == WaitStatus::kAborted; },
               "the group's end");
  });
}

// The first rank's kernel has waited for the other, and then got what it needed.
TEST_CASE("gpu transport: a rank may leave as soon as its own last call is over") {
  use_emulator();
  run_ranks(2, [](Communicator& communicator) {
    Rank rank(communicator);
    if (communicator.rank() == 1) usleep(100'000);
    rank.run_case({.num_elems = 1000});
    if (communicator.rank() == 1) return;
    while (communicator.group_state()->state_of(1) != WaitStatus::kPeerLeft) usleep(1000);
    usleep(60'000);  // in which the watchdog looks
    communicator.failure().rethrow_if_any();
  });
}

constexpr std::size_t kRows = cuda::PeerAllocations::kMaxRows, kBytes = 2 << 20;

// Buffers are found as calls would, but no kernel runs: as many calls as there are rows take long.
TEST_CASE("gpu transport: a full table of mappings stages the buffer that has no row, alone") {
  use_emulator();
  rlimit files = {};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &files) == 0);
  files.rlim_cur = files.rlim_max;
  REQUIRE(setrlimit(RLIMIT_NOFILE, &files) == 0);
  if (files.rlim_max < kRows + 1000) {
    MESSAGE("not tested: too few descriptors for memory");
    return;
  }
  run_ranks(2, [](Communicator& communicator) {
    const cuda::ContextGuard guard(0);
    RecordExchange exchange(communicator, kPatient);
    cuda::DeviceGroup group(exchange, 0);
    cuda::PeerAllocations allocations(exchange, group);
    std::vector<cuda::PeerBuffer> buffers(communicator.rank() == 0 ? kRows + 1 : 1);
    for (cuda::PeerBuffer& buffer : buffers) {
      cuda::DevicePtr address = 0;
      cuda::check(cuda::driver().mem_alloc(&address, kBytes), "allocate a buffer");
      buffer = {reinterpret_cast<const std::byte*>(address), kBytes};
    }
    const auto release = [](const cuda::PeerBuffer& buffer) {
      cuda::check(cuda::driver().mem_free(reinterpret_cast<cuda::DevicePtr>(buffer.data)), "free");
    };
    std::uint64_t call = 0;
    const auto num_in_place_after = [&](int num_calls) {
      for (const std::uint64_t end = call + static_cast<std::uint64_t>(num_calls); call < end;) {
        for (cuda::PeerBuffer& buffer : buffers) buffer.place = 0;
        allocations.find_places(call, buffers);
        allocations.follow(++call, /*may_unmap=*/true);
        barrier(communicator);
      }
      return std::ranges::count_if(buffers, [](const auto& buffer) { return buffer.place != 0; });
    };
    const auto num_rows = static_cast<std::ptrdiff_t>(std::min(buffers.size(), kRows));
    expect(num_in_place_after(6) == num_rows, "a row for each buffer while there is one");
    expect((buffers.back().place == 0) == (communicator.rank() == 0), "that the last has none");
    if (communicator.rank() == 0) {
      release(buffers.front());
      buffers.erase(buffers.begin());
    }
    expect(num_in_place_after(70) == num_rows, "the row of what was freed for the last");
    for (const cuda::PeerBuffer& buffer : buffers) release(buffer);
  });
}

}  // namespace
