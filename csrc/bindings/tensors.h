#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>
#include <vector>

#include "collectives/collective.h"
#include "collectives/op_kind.h"
#include "communicator/communicator.h"

struct _object;  // Python's PyObject

namespace c10d {
class ProcessGroup;
}

namespace ringcomm {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
/// Without an allocation for up to 16 ranks.
template <class Value>
using PerRank = c10::SmallVector<Value, 16>;

// ---- checks of the tensors that users pass: torch's ValueError or TypeError; `op` is what they
// ---- called

/// Dense, defined, no view with a negative bit, and on a CPU or an accelerator.
void check_tensor(const at::Tensor& tensor, const char* op);
void check_same_dtype(const at::Tensor& a, const at::Tensor& b, const char* op);
/// float32, float16 or bfloat16; `name` is the argument's.
void check_float_dtype(const at::Tensor& tensor, const char* name, const char* op);
DType reduced_dtype(const at::Tensor& tensor, const char* op);
const at::Tensor& only_tensor(const Tensors& tensors, const char* op);
/// In-place forms have no gradient, because another operator's backward may need the overwritten
/// values. `instead` is the form that has one, or "".
void check_no_grad(const at::Tensor& tensor, const char* op, const char* instead);
/// The reduction that our operators call by this name.
c10d::ReduceOp reduce_op_from(const std::string& name);

// ---- calls

/// A collective on tensors, or a message: the engine's call, the tensors it points to, and the
/// function that runs after it.
struct TensorCall {
  Collective call;
  PerRank<const void*> inputs = {};
  PerRank<void*> outputs = {};
  PerRank<std::size_t> input_elems = {};           ///< empty, or of each shard
  PerRank<std::size_t> output_elems = {};          ///< the same
  std::shared_ptr<const ShardUpdate> update = {};  ///< null where the call updates nothing
  Tensors kept;      ///< everything `inputs`, `outputs` and `update` point into
  Tensors profiled;  ///< what the caller gave as input; profilers show its shapes
  /// Copies results where the call could not put them; may be empty.
  std::function<void()> finish = {};

  /// Makes `call` point to the vectors, which must not be moved afterwards.
  void link();
  /// Gives up the sizes of an all_to_all's shards for call.num_elems if all are equal.
  void take_even_size();
  /// What a message reads or writes.
  void* message_data() const {
    return call.op == OpKind::kSend ? const_cast<void*>(inputs[0]) : outputs[0];
  }
};

/// Adds the pointers to `num_parts` of `num_bytes` each.
template <class Pointer>
void add_parts(Pointer data, std::size_t num_bytes, int num_parts, PerRank<Pointer>& parts) {
  for (int part = 0; part < num_parts; ++part)
    parts.push_back(at(data, static_cast<std::size_t>(part), num_bytes));
}

/// The engine's call that moves `shard` of each rank, as bytes with the name of their type.
Collective moving(OpKind op, const at::Tensor& shard, int root = -1);
/// The engine's call that reduces; `buffer` is what one rank gets.
Collective reducing(OpKind op, const at::Tensor& buffer, const c10d::ReduceOp& reduction,
                    const char* name, int root = -1);

/// An output that the engine can write: the tensor itself, or a contiguous buffer that the call's
/// finish() copies back. Throws ValueError if elements of the tensor share a location.
at::Tensor writable(const at::Tensor& tensor, TensorCall& item, bool is_input_too = false);
/// Copies a result to a tensor that the call could not write directly, unseen by autograd like the
/// engine's own writes: the tensor may be a parameter or an inference tensor. From any thread.
void copy_back(const at::Tensor& to, const at::Tensor& from);
/// A contiguous tensor with the same numbers in memory, also of a conjugate view.
at::Tensor plain(const at::Tensor& tensor);
/// A contiguous tensor to read from, kept alive by the call.
void* readable(const at::Tensor& tensor, TensorCall& item);

/// Tensors to read from and to write to, one for each rank. Throws ValueError where outputs overlap
/// each other.
void add_inputs(const Tensors& tensors, TensorCall& item);
void add_outputs(const Tensors& tensors, TensorCall& item);

/// The same bits for c10d's complex tensors, which sum like pairs of reals. Throws ValueError for
/// other reductions.
at::Tensor as_real(const at::Tensor& tensor, const c10d::ReduceOp& op);
/// A rank's operand of a reduction: the tensor itself or, for ReduceOp.PREMUL_SUM, a copy times the
/// factor, rounded in the tensor's own type. Throws TypeError if the type has no such products.
at::Tensor premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op);
/// The input of a call that writes into `buffer`: `buffer` itself, or a copy times a factor.
const void* input_of(const at::Tensor& buffer, const c10d::ReduceOp& op, TensorCall& item);

/// The device of the calls' tensors and results; the CPU if there are none. Throws ValueError if
/// they are on several devices.
c10::Device device_of(const std::vector<TensorCall>& calls, const Tensors& results,
                      const char* title);

inline std::size_t num_elems_of(const at::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel());
}
/// The text as the engine's name of an element type, truncated to the size of one.
ElementName element_name(std::string_view text);
/// Makes a backward pass fail that saved what the tensor was before.
void mark_written(const at::Tensor& tensor);

// ---- collectives of ringcomm._kernels, on a group by its name; they block

/// The tensors of a reduce_scatter_update_all_gather: whole parameters and gradient, and this
/// rank's shard of the state.
struct UpdateTensors {
  const at::Tensor& param;
  const at::Tensor& grad;
  std::optional<at::Tensor> master;
  /// By name, in the order of ShardUpdate's states.
  std::vector<std::pair<const char*, std::optional<at::Tensor>>> states;
};

/// `spec` lacks what follows from the tensors. Throws ValueError for another backend's group.
void reduce_update_gather(const std::string& group_name, const UpdateTensors& tensors,
                          const UpdateSpec& spec, bool is_average);
/// Over any backend.
void all_reduce_in_place(c10d::ProcessGroup& group, const at::Tensor& tensor,
                         const c10d::ReduceOp& op);
/// All ranks' softmax stats, merged in rank order, and the number of ranks. Over any backend.
std::pair<at::Tensor, int> merge_over_ranks(const at::Tensor& stats, const std::string& group_name);

// ---- operators without torch's dispatcher

/// The tensor of a Python object, if an operator on it would run the kernel for CPUs and nothing
/// else: no autograd, tracing, transform, mode, subclass or profiler. Null otherwise.
const at::Tensor* find_eager(_object* object);

}  // namespace ringcomm
