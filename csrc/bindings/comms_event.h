#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <tuple>
#include <vector>

#include "bindings/tensor_call.h"

namespace ringcomm {

/// A call as profilers show it: the event record_param_comms of torch's own backends, with their
/// fields. It has no field for the algorithm, so the algorithm is part of the name:
/// "all_reduce/two_shot".
struct CommsEvent {
  std::int64_t seq = 0;
  bool is_p2p = false;
  std::tuple<std::string, std::string> group;  ///< name and description
  int rank = 0;
  int world_size = 1;
  const std::vector<uint64_t>* global_ranks = nullptr;
  std::string name;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  std::int64_t input_bytes = 0;
  std::int64_t output_bytes = 0;
  std::vector<std::int64_t> input_splits;   ///< in bytes
  std::vector<std::int64_t> output_splits;  ///< in bytes
  bool is_async = false;

  /// Takes sizes and tensors from the collectives of a call.
  void describe(const std::vector<TensorCall>& calls, const std::vector<at::Tensor>& results);

  /// Runs `body` within the event.
  c10::intrusive_ptr<c10d::Work> around(c10::function_ref<c10::intrusive_ptr<c10d::Work>()> body);
};

/// Whether a profiler is active: an event costs as much as a small collective.
bool is_profiled();

}  // namespace ringcomm
