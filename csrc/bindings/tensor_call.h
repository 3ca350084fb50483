#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "collectives/communicator.h"

namespace ringcomm {

/// A collective in terms of tensors: the engine's call, what it points to, and what to do when it
/// is over.
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

  /// Has `call` point to the vectors, which must stay where they are from then on.
  void link();
  /// Takes the size of the shares as call.num_elems where all are alike, as all_to_all wants it.
  void take_even_size();
};

/// An output that the engine can write: the tensor itself, or a contiguous stand-in that the call's
/// finish() copies back. Throws ValueError where elements of the tensor share a location.
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
/// Cuts a contiguous tensor in parts of `splits` rows each, for an array of pointers and sizes in
/// bytes; in equal parts where there are no splits. Throws ValueError where that does not work;
/// `what` names the tensor.
void add_rows(const at::Tensor& buffer, const std::vector<int64_t>& splits, int world_size,
              const char* what, const std::function<void(void*, std::size_t)>& add);

/// The same bits for c10d's complex tensors, which sum like pairs of reals. Throws ValueError where
/// the reduction is another one.
at::Tensor as_real(const at::Tensor& tensor, const c10d::ReduceOp& op);

/// Throws ValueError where elements of an output share a location, which cannot hold their results.
void check_no_overlap(const at::Tensor& tensor);
/// Where the tensors of calls, and their results, lie; the CPU where there are none. Throws
/// ValueError where they lie on several devices.
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
