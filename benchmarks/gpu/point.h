#pragma once

// What kernel_sweep measures: a point, its graph, and its line of output.

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "collectives/call.h"
#include "cuda/driver/driver.h"
#include "gpu/latency_model.h"

namespace ringcomm::benchmarks {

// CUDA graphs, which the engine leaves to its users.
using Graph = struct GraphTag*;
using GraphExec = struct GraphExecTag*;
struct GraphApi {
  cuda::Result (*begin)(cuda::StreamHandle, int) = nullptr;
  cuda::Result (*end)(cuda::StreamHandle, Graph*) = nullptr;
  cuda::Result (*instantiate)(GraphExec*, Graph, unsigned long long) = nullptr;
  cuda::Result (*launch)(GraphExec, cuda::StreamHandle) = nullptr;

  GraphApi() {
    cuda::driver();  // which opens the library for all to see
    find(begin, "cuStreamBeginCapture_v2");
    find(end, "cuStreamEndCapture");
    find(instantiate, "cuGraphInstantiateWithFlags");
    find(launch, "cuGraphLaunch");
  }
  template <class F>
  void find(F& function, const char* symbol) {
    function = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, symbol));
    if (function == nullptr) throw std::runtime_error(std::string("the driver has no ") + symbol);
  }
};

struct Point {
  OpKind op = OpKind::kAllReduce;
  DType dtype = DType::kBFloat16;
  std::size_t num_bytes = 0;  // of the longer buffer of a rank
  Path path = Path::kCopy;
  std::size_t layout = 0;
  unsigned num_blocks = 0;
  PlannedCall planned = {};
  int num_calls = 1;
  std::uint64_t num_wrong = 0;
  GraphExec graph = nullptr;
  std::vector<double> us = {};

  /// Of the times; 0 where there are none.
  double quantile(double share) const {
    if (us.empty()) return 0;
    std::vector<double> sorted = us;
    std::sort(sorted.begin(), sorted.end());
    return sorted[static_cast<std::size_t>(share * static_cast<double>(sorted.size() - 1) + 0.5)];
  }
  std::string describe() const {
    return std::string(name_of(op)) + " " + kPathNames[static_cast<int>(path)] + " of " +
           std::to_string(num_bytes) + " bytes, " + std::to_string(num_blocks) + " blocks";
  }
};

/// `copy_us` is what a copy of as many bytes takes, all ranks at once.
inline void print_line(const Point& point, double copy_us, double predicted_us,
                       std::uint64_t num_wrong) {
  const double p50 = point.quantile(0.5);
  std::printf(
      R"({"kind":"kernels","op":"%s","dtype":"%s","ranks":%d,"bytes":%zu,"path":"%s","blocks":%u,)"
      R"("held_vectors":%u,"is_plan":%s,"calls":%d,"samples":%zu,)"
      R"("p50_us":%.2f,"p99_us":%.2f,"predicted_us":%.2f,"gb_per_s":%.4g,"copy_share":%.4g,"num_wrong":%llu})"
      "\n",
      point.path == Path::kCopy ? "copy" : name_of(point.op), name_of(point.dtype),
      point.planned.num_ranks, point.num_bytes, kPathNames[static_cast<int>(point.path)],
      point.num_blocks, cuda::kHeldVectors, point.layout == 0 ? "true" : "false", point.num_calls,
      point.us.size(), p50, point.quantile(0.99), predicted_us,
      static_cast<double>(point.num_bytes) / p50 / 1e3, copy_us * point.planned.copies() / p50,
      static_cast<unsigned long long>(num_wrong));
}

}  // namespace ringcomm::benchmarks
