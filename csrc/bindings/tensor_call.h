#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "collectives/communicator.h"

namespace ringcomm {

/// A collective on tensors: the engine's call, the tensors it points to, and the function that runs
/// after it.
struct TensorCall {
  Collective call;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  std::vector<std::size_t> input_elems;            ///< empty, or of each share
  std::vector<std::size_t> output_elems;           ///< empty, or of each share
  std::shared_ptr<const ShardUpdate> update = {};  ///< null where the call updates nothing
  std::vector<at::Tensor> kept;      ///< everything `inputs`, `outputs` and `update` point into
  std::vector<at::Tensor> profiled;  ///< what the caller gave as input; profilers show its shapes
  /// Copies results where the call could not put them; may be empty.
  std::function<void()> finish = {};
  Communicator::Sequence sequence = {};  ///< if there is one, it is run in place of `call`

  /// Makes `call` point to the vectors, which must not be moved afterwards.
  void link();
  /// Sets call.num_elems to the size of the shares if all are equal, as all_to_all requires.
  void take_even_size();
};

/// An output that the engine can write: the tensor itself, or a contiguous buffer that the call's
/// finish() copies back. Throws ValueError if elements of the tensor share a location.
class Writable {
 public:
  Writable(const at::Tensor& tensor, TensorCall& item, bool is_input_too);
  const at::Tensor& buffer() const { return buffer_; }

 private:
  at::Tensor buffer_;
};

/// A contiguous tensor with the same numbers in memory: also where a conjugate or negative view
/// stores others than it shows.
at::Tensor plain(const at::Tensor& tensor);
/// A contiguous tensor to read from, kept alive by the call.
const void* readable(const at::Tensor& tensor, TensorCall& item);

/// Tensors to read from and to write to, one for each rank; sizes in units of `element_bytes`.
/// Throws ValueError where outputs overlap each other.
void add_inputs(const std::vector<at::Tensor>& tensors, std::size_t element_bytes,
                TensorCall& item);
void add_outputs(const std::vector<at::Tensor>& tensors, std::size_t element_bytes,
                 TensorCall& item);
/// Splits a contiguous tensor into parts of `splits` rows each, or into equal parts without splits,
/// and passes each part's pointer and size in bytes to `add`. Throws ValueError if the splits do
/// not fit; `what` names the tensor.
void add_rows(const at::Tensor& buffer, const std::vector<int64_t>& splits, int world_size,
              const char* what, const std::function<void(void*, std::size_t)>& add);

/// The same bits for c10d's complex tensors, which sum like pairs of reals. Throws ValueError for
/// other reductions.
at::Tensor as_real(const at::Tensor& tensor, const c10d::ReduceOp& op);

/// Throws ValueError where elements of an output share a location, which cannot hold their results.
void check_no_overlap(const at::Tensor& tensor);
/// The device of the calls' tensors and results; the CPU if there are none. Throws ValueError if
/// they are on several devices.
c10::Device device_of(const std::vector<TensorCall>& calls, const std::vector<at::Tensor>& results,
                      const char* title);
/// The rank as a number of the group; throws ValueError. `what` names it in the message.
int checked_rank(int64_t rank, int world_size, const char* what);

inline std::size_t num_elems_of(const at::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel());
}
inline std::byte* offset(void* data, std::size_t num_bytes) {
  return static_cast<std::byte*>(data) + num_bytes;
}

}  // namespace ringcomm
