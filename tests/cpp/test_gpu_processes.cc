// Groups on a GPU of ranks that are processes, over the emulator of CUDA's driver.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "children.h"
#include "cuda/collectives/ipc_transport.h"
#include "cuda/driver/driver.h"
#include "folder_store.h"
#include "host/process.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;

// Sums of different values at each place and turn, of one allocation; the number of wrong sums.
int num_wrong_sums(int rank, const std::string& folder) {
  constexpr std::size_t kNumBytes = std::size_t{8} << 20, kNumElems = kNumBytes / 4;
  constexpr int kTurns = 8;
  const cuda::ContextGuard guard(0);
  FolderStore store(folder, [] {});
  Communicator communicator(store, rank, 2, {}, kBound);
  const auto transport = std::make_unique<cuda::IpcTransport>(
      communicator, 0, WaitLimits{.timeout = kBound, .is_interrupted = {}},
      [](const std::string&) {}, [] { return nullptr; });
  cuda::StreamHandle stream = nullptr;
  cuda::check(cuda::driver().stream_create(&stream, cuda::kStreamNonBlocking), "make a stream");
  cuda::DevicePtr address = 0;
  cuda::check(cuda::driver().mem_alloc(&address, kNumBytes), "allocate");
  auto* const data = reinterpret_cast<std::int32_t*>(address);
  int num_wrong = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    for (std::size_t i = 0; i < kNumElems; ++i)
      data[i] = static_cast<std::int32_t>(i % 1001) * (rank + 1) + turn;
    const void* input = data;
    void* output = data;
    Collective call{{.num_elems = kNumElems, .op = OpKind::kAllReduce, .dtype = DType::kInt32},
                    &input,
                    &output};
    transport->plan(call, /*is_captured=*/false);
    transport->enqueue(call, cuda::StreamContext::of(stream));
    cuda::check(cuda::driver().stream_synchronize(stream), "wait");
    communicator.failure().rethrow_if_any();
    bool is_wrong = false;
    for (std::size_t i = 0; i < kNumElems; ++i)
      is_wrong = is_wrong || data[i] != static_cast<std::int32_t>(i % 1001) * 3 + 2 * turn;
    num_wrong += is_wrong ? 1 : 0;
  }
  return num_wrong;
}

constexpr int kCannotUnshareProcesses = 77;

TEST_CASE("child: sums of a rank" * doctest::skip()) {
  CHECK(::getpid() == 1);
  const int rank = std::atoi(std::getenv("RINGCOMM_TEST_RANK"));
  CHECK(num_wrong_sums(rank, std::getenv("RINGCOMM_TEST_FOLDER")) == 0);
}

#if !defined(__SANITIZE_THREAD__)  // which lets no thread start in a child of a threaded program
// In a PID namespace of its own, as in a container: its pid is 1.
[[noreturn]] void become_rank(std::size_t rank, const std::string& folder,
                              const std::string& image) {
  setenv("RINGCOMM_TEST_RANK", std::to_string(rank).c_str(), 1);
  setenv("RINGCOMM_TEST_FOLDER", folder.c_str(), 1);
  setenv("RINGCOMM_EMULATOR_BOX", folder.c_str(), 1);
  setenv("RINGCOMM_CUDA_IMAGE", image.c_str(), 1);
  setenv("RINGCOMM_CUDA_DRIVER", RINGCOMM_EMULATOR, 1);
  // Its search for leaks needs threads by their numbers outside of the namespace.
  setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
  if (::unshare(CLONE_NEWPID) != 0) ::_exit(kCannotUnshareProcesses);
  const pid_t pid = ::fork();
  if (pid == 0) become_case("--test-case=child: sums of a rank");
  ::_exit(end_of(pid));
}

TEST_CASE("gpu processes: ranks with equal pids use each other's memory, not their own") {
  const std::string folder =
      (std::filesystem::temp_directory_path() / ("ringcomm-pids-" + host::random_text())).string();
  std::filesystem::create_directory(folder);
  const std::string image = folder + "/image";
  std::ofstream(image) << "RINGCOMM-EMULATED";
  std::array<pid_t, 2> children = {};
  for (std::size_t rank = 0; rank < children.size(); ++rank) {
    children[rank] = ::fork();
    if (children[rank] == 0) become_rank(rank, folder, image);
  }
  for (const pid_t child : children) {
    const int status = end_of(child);
    if (status == kCannotUnshareProcesses)
      MESSAGE("skipped: this user may not make PID namespaces");
    else
      CHECK(status == 0);
  }
  std::filesystem::remove_all(folder);
}
#endif

}  // namespace
