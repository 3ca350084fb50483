#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "collectives/call.h"
#include "communicator/communicator.h"
#include "kernels/torch_checks.h"

namespace ringcomm {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
/// Without an allocation for up to 16 ranks.
template <class Value>
using PerRank = c10::SmallVector<Value, 16>;

/// The one tensor of a rank, checked.
const at::Tensor& only_tensor(const Tensors& tensors, const char* op);
/// The reduction that our operators call by this name.
c10d::ReduceOp reduce_op_from(const std::string& name);

// ---- calls

/// What a call of c10d is to its work, to profilers and to recordings.
struct CallInfo {
  c10d::OpType op_type;
  const char* title;  ///< "ringcomm:all_reduce"
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
  bool is_async = false;
  std::optional<c10::Device> device = {};  ///< of a call without tensors
  int peer = -1;                           ///< of a message
  int tag = 0;                             ///< of a message

  CallInfo(c10d::OpType type, const char* name) : op_type(type), title(name) {}
  /// `options` are c10d's of a collective.
  template <class Options>
  CallInfo(c10d::OpType type, const char* name, const Options& options)
      : op_type(type), title(name), timeout(options.timeout), is_async(options.asyncOp) {}
};

/// A collective on tensors, or a message: the engine's call, the tensors it points to, and the
/// function that runs after it.
struct TensorCall {
  Collective call;
  PerRank<const void*> inputs = {};
  PerRank<void*> outputs = {};
  PerRank<std::size_t> input_elems = {};   ///< empty, or of each shard
  PerRank<std::size_t> output_elems = {};  ///< the same
  Tensors kept = {};                       ///< everything that the call points into
  Tensors profiled = {};  ///< what the caller gave as input; profilers show its shapes
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

}  // namespace ringcomm
