// The short way of a synchronous collective: the engine's call and its pointers are on the stack,
// no tensor is kept, and there is no work. With up to 16 ranks nothing is allocated on a CPU.

#include <ATen/record_function.h>

#include "bindings/process_group.h"
#include "bindings/python_errors.h"
#include "collectives/collective.h"
#include "collectives/op_kind.h"
#include "collectives/trace.h"

namespace ringcomm {
namespace {

// The engine reads and writes its memory; an empty or freed one takes the other way.
bool is_dense(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         !tensor.is_conj() && !tensor.is_neg() && tensor.storage().nbytes() > 0;
}

// By a profiler or a trace, which get what start() knows of a call.
bool is_observed() { return at::hasCallbacks() || recorder::is_tracing(); }

}  // namespace

bool ProcessGroupRingcomm::fits_at_once(const at::Tensor& input, const at::Tensor& output,
                                        const c10d::ReduceOp* op) const {
  if (!is_dense(input) || is_observed()) return false;
  if (!output.is_same(input) &&
      (!is_dense(output) || input.device() != output.device() || input.dtype() != output.dtype()))
    return false;
  if (op != nullptr && (input.is_complex() || op->op_ == c10d::ReduceOp::PREMUL_SUM)) return false;
  // In a coalesced block every call on a device has a work.
  return input.is_cpu() || (!input.is_meta() && !is_coalescing_);
}

WorkPtr ProcessGroupRingcomm::run_at_once(Collective call, const at::Tensor& input,
                                          const at::Tensor& output,
                                          std::chrono::milliseconds timeout) {
  PerRank<const void*> inputs;
  PerRank<void*> outputs;
  if (call.inputs == nullptr) {
    const auto num_buffers = [&](OpKind sharded) { return call.op == sharded ? getSize() : 1; };
    // First: it may give a shared storage memory of its own.
    add_parts(output.data_ptr(), call.num_bytes(), num_buffers(OpKind::kAllGather), outputs);
    add_parts(input.const_data_ptr(), call.num_bytes(), num_buffers(OpKind::kReduceScatter),
              inputs);
    call.inputs = inputs.data();
    call.outputs = outputs.data();
  }
  if (input.is_cpu())
    run_on_cpu(call, timeout);
  else
    devices()->run_at_once(input.device(), call, {input, output});
  return {};
}

bool ProcessGroupRingcomm::barrier_at_once(const c10d::BarrierOptions& opts) {
  if (opts.asyncOp || is_observed() || (opts.device && !opts.device->is_cpu())) return false;
  run_on_cpu({}, opts.timeout);
  return true;
}

void ProcessGroupRingcomm::run_on_cpu(const Collective& call, std::chrono::milliseconds timeout) {
  const std::shared_ptr<Communicator> engine = communicator();
  const WaitLimits limits{.timeout = effective(timeout), .is_interrupted = is_interrupted};
  with_python_errors([&] { engine->run(call, limits); });
}

}  // namespace ringcomm
