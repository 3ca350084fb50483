#pragma once

// What one process has on GPU 0: a stream, the kernels, and host memory that they write to.

#include <sched.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

#include "cuda/driver/device_memory.h"
#include "cuda/driver/driver.h"
#include "gpu/probe/kernels.h"
#include "gpu/probe/work.h"

namespace ringcomm::probe {

inline constexpr std::uint64_t kHoldNs = 200'000'000;

inline std::string name_of(cuda::Result result) {
  const char* name = nullptr;
  cuda::driver().get_error_name(result, &name);
  return name != nullptr ? name : std::to_string(result);
}

/// All functions throw where the driver refuses.
class Gpu {
 public:
  Gpu() : guard_(0), memory_(0, sizeof(Words)) {
    cuda::check(cuda::driver().stream_create(&stream_, cuda::kStreamNonBlocking), "make a stream");
    // The emulator has the kernels under an image of its own.
    const char* path = std::getenv("RINGCOMM_CUDA_IMAGE");
    if (path != nullptr) {
      std::ifstream file(path, std::ios::binary);
      image_.assign(std::istreambuf_iterator<char>(file), {});
    }
    hold_ = load(kPtx, "probe_hold");
    follow_ = load(kPtx, "probe_follow");
  }

  volatile Words& words() const { return *static_cast<Words*>(memory_.host()); }
  /// What a block has noted; after finish().
  Words::Block block(unsigned idx) const {
    return static_cast<const Words*>(memory_.host())->blocks[idx];
  }
  int attribute(int which) const {
    int value = 0;
    cuda::check(cuda::driver().device_get_attribute(&value, which, 0), "ask the GPU");
    return value;
  }
  std::size_t free_mib() const {
    std::size_t num_free = 0, num_total = 0;
    cuda::check(cuda::driver().mem_get_info(&num_free, &num_total), "ask for free memory");
    return num_free >> 20;
  }
  void fill(cuda::DevicePtr address, unsigned char value, std::size_t num_bytes) const {
    cuda::check(cuda::driver().memset_d8_async(address, value, num_bytes, stream_), "fill");
    finish();
  }
  void finish() const {
    cuda::check(cuda::driver().stream_synchronize(stream_), "wait for the stream");
  }

  /// Starts a kernel, and waits until it runs, for 2 s at most.
  void start_hold(unsigned num_blocks = 1, std::uint64_t limit_ns = kHoldNs) {
    start(hold_, num_blocks, limit_ns);
  }
  void start_follow(cuda::DevicePtr address, std::uint64_t limit_ns = kHoldNs) {
    words().address = address;
    words().has_read = 0;
    start(follow_, 1, limit_ns);
  }
  /// The 4 bytes there, as a kernel reads them.
  std::uint32_t read(cuda::DevicePtr address) {
    start_follow(address);
    finish();
    if (words().has_read == 0) throw std::runtime_error("a kernel did not read");
    return static_cast<std::uint32_t>(words().value);
  }
  cuda::StreamHandle stream() const { return stream_; }
  Work work(std::uint64_t limit_ns) const {
    return {static_cast<Words*>(memory_.device()), limit_ns};
  }
  cuda::Function load(const char* ptx, const char* name) const {
    cuda::Module module = nullptr;
    cuda::Function function = nullptr;
    cuda::check(cuda::driver().module_load_data(&module, image_.empty() ? ptx : image_.c_str()),
                "load the probe's kernels");
    cuda::check(cuda::driver().module_get_function(&function, module, name), "find a kernel");
    return function;
  }

 private:
  void start(cuda::Function function, unsigned num_blocks, std::uint64_t limit_ns) {
    words().has_started = 0;
    Work parameter = work(limit_ns);
    void* parameters[] = {&parameter};
    cuda::check(cuda::driver().launch_kernel(function, num_blocks, 1, 1, 1, 1, 1, 0, stream_,
                                             parameters, nullptr),
                "launch a kernel");
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
    while (words().has_started == 0) {
      if (std::chrono::steady_clock::now() > deadline)
        throw std::runtime_error("a kernel did not start in 2 s");
      sched_yield();
    }
  }

  cuda::ContextGuard guard_;
  cuda::MappedHostMemory memory_;
  cuda::StreamHandle stream_ = nullptr;
  cuda::Function hold_ = nullptr, follow_ = nullptr;
  std::string image_;
};

}  // namespace ringcomm::probe
