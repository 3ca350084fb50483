// Groups on GPUs over the emulator of CUDA's driver: staging, launches, streams, the watchdog.
// Ranks are threads here, and processes in tests/python.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

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
        transport_(cuda::IpcTransport::make(communicator, 0,
                                            {.timeout = timeout, .is_interrupted = {}},
                                            [this](const std::string& text) {
                                              const std::lock_guard lock(mutex_);
                                              report_ = text;
                                            })) {
    cuda::check(cuda::driver().stream_create(&stream_, cuda::kStreamNonBlocking), "make a stream");
  }
  ~Rank() {
    transport_.reset();
    cuda::driver().stream_destroy(stream_);
  }

  cuda::IpcTransport& transport() { return *transport_; }
  cuda::StreamHandle stream() const { return stream_; }
  void start(Collective call) {
    call.set_number(0, communicator_.world_size());
    transport_->plan(call);
    transport_->enqueue(call, cuda::StreamPlace::of(stream_));
  }
  void finish() { cuda::check(cuda::driver().stream_synchronize(stream_), "wait"); }
  void run_case(const Case& c) {
    CaseBuffers buffers(c, communicator_.rank(), communicator_.world_size());
    start(buffers.call());
    finish();
    communicator_.failure().rethrow_if_any();
    buffers.check();
  }
  std::string report() {
    const std::lock_guard lock(mutex_);
    return report_;
  }

 private:
  Communicator& communicator_;
  cuda::ContextGuard guard_;
  std::mutex mutex_;
  std::string report_;
  cuda::StreamHandle stream_ = nullptr;
  std::unique_ptr<cuda::IpcTransport> transport_;
};

TEST_CASE("gpu transport: every op on the emulated device") {
  use_emulator();
  run_ranks(2, [](Communicator& communicator) {
    Rank rank(communicator);
    std::uint32_t salt = 0;
    for (const std::size_t num_elems : {std::size_t{0}, std::size_t{77}, std::size_t{100'000}})
      for (const OpKind op :
           {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter, OpKind::kAllGather,
            OpKind::kBroadcast, OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll})
        rank.run_case({.op = op,
                       .dtype = reduces(op) ? DType::kFloat32 : DType::kByte,
                       .root = rooted(op) ? 1 : -1,
                       .num_elems = num_elems,
                       .salt = ++salt});
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
      for (const DType dtype : {DType::kFloat32, DType::kInt64})
        for (const Reduction reduction : {Reduction::kSum, Reduction::kMax})
          for (std::size_t num_elems = 1; num_elems < 200'000; num_elems *= 7)
            rank.run_case({.op = OpKind::kAllReduce,
                           .dtype = dtype,
                           .reduction = reduction,
                           .num_elems = num_elems,
                           .salt = ++salt});
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
    for (int i = 0; i < 1000 && !communicator.failure().has_failed(); ++i) usleep(5000);
    try {
      communicator.failure().rethrow_if_any();
      expect(false, "an error");
    } catch (const Error& error) {
      const std::string text = error.what();
      expect(error.info().kind == ErrorKind::kMismatch, "a mismatch, got " + text);
      expect(text.find("40 bytes") != std::string::npos, "one call in " + text);
      expect(text.find("400000 bytes") != std::string::npos, "the other in " + text);
    }
  });
}

TEST_CASE("gpu transport: a rank that does not come is a time-out that names it") {
  use_emulator();
  run_ranks(2, [](Communicator& communicator) {
    Rank rank(communicator, std::chrono::milliseconds(300));
    if (communicator.rank() == 0) {
      const Case c{.num_elems = 1000};
      CaseBuffers buffers(c, 0, 2);
      rank.start(buffers.call());
      rank.finish();
      for (int i = 0; i < 1000 && !communicator.failure().has_failed(); ++i) usleep(5000);
    }
    while (communicator.group_state()->state_of(1 - communicator.rank()) != WaitStatus::kAborted)
      usleep(5000);
    if (communicator.rank() == 1) return;
    try {
      communicator.failure().rethrow_if_any();
      expect(false, "an error");
    } catch (const Error& error) {
      expect(error.info().kind == ErrorKind::kTimeout && error.info().rank == 1, error.what());
    }
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

}  // namespace
