#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <typeinfo>

#include "bindings/process_group.h"
#include "collectives/call.h"
#include "kernels/losses/torch_softmax_stats.h"
#include "kernels/norms/torch_rms_norm.h"
#include "kernels/reductions/reduce_op.h"

// torch.ops.ringcomm.*: collectives as torch operators, so that torch.compile sees them. Fakes,
// autograd and wrappers are in ringcomm/ops, in the same order. They run over any backend of
// torch.distributed; the explicit ring needs ringcomm. The wrappers call the same functions without
// torch's dispatcher where nothing but the CPU's kernel would run.

// _allgather_base and _reduce_scatter_base have new names since torch 2.13, which 2.11 does not
// know.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace py = pybind11;

namespace ringcomm {
namespace {

// Whether to ask the group for a work. Usually none is needed, since the operators wait; but a
// subclass in Python cannot return none to C++: torch wraps it as a work that crashes.
bool needs_work(const c10d::ProcessGroup& group) {
  return typeid(group) != typeid(c10d::ProcessGroup);
}

// A group's backend for a type of device; null where it has none. To ask for the group's devices
// first would allocate a list of them in each call.
c10::intrusive_ptr<c10d::Backend> backend_for(c10d::ProcessGroup& group, c10::DeviceType type) {
  try {
    return group.getBackend(type);
  } catch (const c10::Error&) {
    return {};
  }
}

// A group's backend for the tensor's device if it is ringcomm's, else null.
c10::intrusive_ptr<ProcessGroupRingcomm> ringcomm_for(c10d::ProcessGroup& group,
                                                      const at::Tensor& tensor) {
  // Not torch's dynamic_intrusive_pointer_cast, which leaks objects of another class.
  auto* const ringcomm =
      dynamic_cast<ProcessGroupRingcomm*>(backend_for(group, tensor.device().type()).get());
  if (ringcomm == nullptr) return {};
  return c10::intrusive_ptr<ProcessGroupRingcomm>::reclaim_copy(ringcomm);
}

// The same, but null if the group is a subclass, whose calls may do more than forward to the
// backend.
c10::intrusive_ptr<ProcessGroupRingcomm> find_ringcomm(c10d::ProcessGroup& group,
                                                       const at::Tensor& tensor) {
  return needs_work(group) ? nullptr : ringcomm_for(group, tensor);
}

// Calls `start(backend, is_async)` and waits: with ringcomm's own backend, without torch's
// dispatcher, where that is all that the group would do; else with the group.
template <class Start>
void run_on(c10d::ProcessGroup& group, const at::Tensor& tensor, const Start& start) {
  const auto ringcomm = find_ringcomm(group, tensor);
  const WorkPtr work =
      ringcomm != nullptr ? start(*ringcomm, false) : start(group, needs_work(group));
  if (work != nullptr) work->wait();
}

void all_reduce_in_place(c10d::ProcessGroup& group, const at::Tensor& tensor,
                         const c10d::ReduceOp& op) {
  if (const auto ringcomm = find_ringcomm(group, tensor)) {
    ringcomm->all_reduce(tensor, tensor, {.reduceOp = op, .asyncOp = false});
    return;
  }
  Tensors tensors = {tensor};
  const WorkPtr work = group.allreduce(tensors, {.reduceOp = op, .asyncOp = needs_work(group)});
  if (work != nullptr) work->wait();
}

at::Tensor contiguous_copy(const at::Tensor& input) {
  return input.detach().clone(at::MemoryFormat::Contiguous);
}

at::Tensor empty_with_rows(int64_t num_rows, const at::Tensor& input) {
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes[0] = num_rows;
  return at::empty(sizes, input.options());
}

void all_reduce_(const at::Tensor& input, const std::string& reduce_op,
                 const std::string& group_name) {
  all_reduce_in_place(*c10d::resolve_process_group(group_name), input, reduce_op_from(reduce_op));
  mark_written(input);
}

// Returns nothing, because torch.compile cannot functionalize an operator that returns an alias of
// an argument.
void all_reduce_into(const at::Tensor& input, const at::Tensor& out, const std::string& reduce_op,
                     const std::string& group_name) {
  TORCH_CHECK_VALUE(input.sizes() == out.sizes(), "ringcomm: all_reduce of a tensor of shape ",
                    input.sizes(), " into one of shape ", out.sizes());
  TORCH_CHECK_TYPE(input.scalar_type() == out.scalar_type(), "ringcomm: all_reduce of ",
                   input.scalar_type(), " into ", out.scalar_type());
  at::assert_no_partial_overlap(input, out);
  const bool is_same = input.is_alias_of(out) && input.data_ptr() == out.data_ptr() &&
                       input.strides() == out.strides();
  if (const auto ringcomm =
          is_same ? nullptr : find_ringcomm(*c10d::resolve_process_group(group_name), out)) {
    ringcomm->all_reduce(input, out, {.reduceOp = reduce_op_from(reduce_op), .asyncOp = false});
    mark_written(out);
    return;
  }
  if (!is_same) out.copy_(input);
  all_reduce_(out, reduce_op, group_name);
}

at::Tensor all_reduce(const at::Tensor& input, const std::string& reduce_op,
                      const std::string& group_name) {
  const at::Tensor source = input.detach();
  const at::Tensor output = at::empty_like(source, source.options(), at::MemoryFormat::Contiguous);
  all_reduce_into(source, output, reduce_op, group_name);
  return output;
}

at::Tensor reduce_scatter(const at::Tensor& input, const std::string& reduce_op,
                          const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  const int64_t world_size = group->getSize();
  TORCH_CHECK_VALUE(input.dim() > 0 && input.size(0) % world_size == 0,
                    "ringcomm: reduce_scatter needs an input whose dimension 0 is a multiple of ",
                    world_size, ", got shape ", input.sizes());
  at::Tensor output = empty_with_rows(input.size(0) / world_size, input);
  at::Tensor contiguous = input.detach().contiguous();
  run_on(*group, output, [&](auto& backend, bool is_async) {
    return backend._reduce_scatter_base(
        output, contiguous, {.reduceOp = reduce_op_from(reduce_op), .asyncOp = is_async});
  });
  return output;
}

at::Tensor all_gather(const at::Tensor& input, const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  TORCH_CHECK_VALUE(
      input.dim() > 0,
      "ringcomm: all_gather concatenates along dimension 0, which a scalar does not have");
  at::Tensor output = empty_with_rows(input.size(0) * group->getSize(), input);
  at::Tensor contiguous = input.detach().contiguous();
  run_on(*group, output, [&](auto& backend, bool is_async) {
    return backend._allgather_base(output, contiguous, {.asyncOp = is_async});
  });
  return output;
}

void broadcast_(const at::Tensor& input, int64_t src, const std::string& group_name) {
  Tensors tensors = {input};
  const auto group = c10d::resolve_process_group(group_name);
  run_on(*group, input, [&](auto& backend, bool is_async) {
    return backend.broadcast(tensors, {.rootRank = src, .asyncOp = is_async});
  });
  mark_written(input);
}

at::Tensor broadcast(const at::Tensor& input, int64_t src, const std::string& group_name) {
  const at::Tensor output = contiguous_copy(input);
  broadcast_(output, src, group_name);
  return output;
}

at::Tensor reduce(const at::Tensor& input, int64_t dst, const std::string& reduce_op,
                  const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  Tensors tensors = {contiguous_copy(input)};
  run_on(*group, input, [&](auto& backend, bool is_async) {
    return backend.reduce(
        tensors, {.reduceOp = reduce_op_from(reduce_op), .rootRank = dst, .asyncOp = is_async});
  });
  return group->getRank() == dst ? tensors[0] : at::zeros_like(tensors[0]);
}

void ring_all_reduce_(const at::Tensor& input, const std::string& group_name) {
  check_tensor(input, "ring_all_reduce_");
  ringcomm_group_of(group_name, input, "ring_all_reduce_")
      ->all_reduce(input, input, {.reduceOp = c10d::ReduceOp::SUM, .asyncOp = false},
                   [](Collective& call) { call.algorithm = Algorithm::kRing; });
  mark_written(input);
}

// The group's backend checks which tensors it supports.
template <class Function>
void define(torch::Library& m, const std::string& schema, Function* function) {
  m.def(schema.c_str());
  const std::string name = schema.substr(0, schema.find('('));
  for (const auto key :
       {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::PrivateUse1})
    m.impl(name.c_str(), key, function);
}

// All ranks' softmax stats, merged in rank order. Backends without this reduction gather them on
// every rank, which merges them.
at::Tensor merge_over_ranks(const at::Tensor& stats, c10d::ProcessGroup& group) {
  at::Tensor merged = at::empty_like(stats);
  if (const auto ringcomm = find_ringcomm(group, stats)) {
    ringcomm->all_reduce(stats, merged, {.reduceOp = c10d::ReduceOp::SUM, .asyncOp = false},
                         [](Collective& call) {
                           call.dtype = DType::kSoftmaxStats;
                           call.reduction = Reduction::kMerge;
                           call.num_elems /= kNumSoftmaxStats;
                         });
    return merged;
  }
  const int world_size = group.getSize();
  at::Tensor all = empty_with_rows(world_size * stats.size(0), stats);
  at::Tensor own = stats;
  run_on(group, own, [&](auto& backend, bool is_async) {
    return backend._allgather_base(all, own, {.asyncOp = is_async});
  });
  std::vector<const void*> parts;
  for (int rank = 0; rank < world_size; ++rank)
    parts.push_back(static_cast<const char*>(all.const_data_ptr()) + rank * stats.nbytes());
  cpu::find_reduce_op(Reduction::kMerge, DType::kSoftmaxStats)
      ->combine(merged.data_ptr(), nullptr, parts.data(), world_size, stats.size(0), 1);
  return merged;
}

at::Tensor merge_softmax_stats(const at::Tensor& stats, const std::string& group_name) {
  check_stats(stats, stats.dim() > 0 ? stats.size(0) - 1 : 0);
  const auto group = c10d::resolve_process_group(group_name);
  const at::Tensor merged = merge_over_ranks(stats, *group);
  check_shards(merged, group->getSize());
  return merged;
}

// The sum is in a cache when it is read again.
void all_reduce_norm(c10d::ProcessGroup& group, const at::Tensor& input, const at::Tensor& residual,
                     const at::Tensor& weight, double eps) {
  check_add_rms_norm(input, residual, weight, eps);
  all_reduce_in_place(group, input, c10d::ReduceOp::SUM);
  add_rms_norm_(input, residual, weight, eps);
}

void all_reduce_add_rms_norm_(const at::Tensor& input, const at::Tensor& residual,
                              const at::Tensor& weight, double eps, const std::string& group_name) {
  all_reduce_norm(*c10d::resolve_process_group(group_name), input, residual, weight, eps);
}

// ---- without the dispatcher

// The tensor of a Python object, if an operator on it would run the kernel for CPUs and nothing
// else: no autograd, tracing, transform, mode, subclass or profiler. Null otherwise.
const at::Tensor* find_eager(PyObject* object) {
  if (!THPVariable_CheckTypeExact(Py_TYPE(object))) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (tensor.requires_grad() && at::GradMode::is_enabled()) return nullptr;
  if (at::hasCallbacks() || at::impl::torch_function_mode_enabled()) return nullptr;
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  // Keys of which our operators have no kernel are in every call's set.
  const c10::DispatchKeySet keys = ((tensor.key_set() | local.included_) - local.excluded_) -
                                   c10::autograd_dispatch_keyset_with_ADInplaceOrView -
                                   c10::autocast_dispatch_keyset -
                                   c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
  return keys.highestPriorityTypeId() == c10::DispatchKey::CPU ? &tensor : nullptr;
}

// Null if the call must go through the dispatcher, which also words the errors.
py::object eager_all_reduce(py::handle input, const std::string& reduce_op, py::handle group,
                            py::handle out) {
  const at::Tensor* const from = find_eager(input.ptr());
  const at::Tensor* const given = from == nullptr || out.is_none() ? from : find_eager(out.ptr());
  if (given == nullptr || !py::isinstance<c10d::ProcessGroup>(group)) return py::none();
  if (!given->is_same(*from) &&
      (given->sizes() != from->sizes() || given->dtype() != from->dtype() ||
       given->storage().is_alias_of(from->storage())))
    return py::none();
  auto& all_backends = *py::cast<c10d::ProcessGroup*>(group);
  const auto ringcomm = find_ringcomm(all_backends, *from);
  if (ringcomm == nullptr) return py::none();
  at::Tensor result;
  {
    const py::gil_scoped_release no_gil;
    result = out.is_none() ? at::Tensor(at::detail::empty_cpu(from->sizes(), from->scalar_type()))
                           : *given;
    ringcomm->all_reduce(*from, result, {.reduceOp = reduce_op_from(reduce_op), .asyncOp = false});
    if (!out.is_none()) mark_written(result);
  }
  return out.is_none() ? py::cast(std::move(result)) : py::reinterpret_borrow<py::object>(out);
}

// False, and nothing is done, if the call must go through the dispatcher.
bool eager_norm(py::handle input, py::handle residual, py::handle weight, double eps,
                py::handle group) {
  const at::Tensor* const x = find_eager(input.ptr());
  const at::Tensor* const sum = find_eager(residual.ptr());
  const at::Tensor* const scale = find_eager(weight.ptr());
  if (x == nullptr || sum == nullptr || scale == nullptr ||
      !py::isinstance<c10d::ProcessGroup>(group))
    return false;
  auto& all_backends = *py::cast<c10d::ProcessGroup*>(group);
  const py::gil_scoped_release no_gil;
  all_reduce_norm(all_backends, *x, *sum, *scale, eps);
  return true;
}

template <class... Options>
auto eager(at::Tensor (*function)(const at::Tensor&, Options...)) {
  return [function](py::handle input, std::decay_t<Options>... options) -> py::object {
    const at::Tensor* const tensor = find_eager(input.ptr());
    if (tensor == nullptr) return py::none();
    at::Tensor result;
    {
      const py::gil_scoped_release no_gil;
      result = function(*tensor, options...);
    }
    return py::cast(std::move(result));
  };
}

// Of views with a negative or a conjugate bit torch's dispatcher would hand a backend copies, and
// drop what a collective writes there. ringcomm gets the views: it writes to those of the second
// kind, and check_tensor() refuses the others, such as z.conj().imag. Other backends, also of the
// same group for another device, get copies.
template <c10::DispatchKey kKey>
void pass_views(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  const auto begin = stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  const c10::IValue& group = *std::find_if(begin, stack->end(), [](const c10::IValue& value) {
    return value.isObject() && *value.type() == *c10::getCustomClassType<Group>();
  });
  const auto passed = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || ringcomm_for(*group.toCustomClass<c10d::ProcessGroup>(), tensor))
      return tensor;
    return kKey == c10::DispatchKey::Negative ? tensor.resolve_neg() : tensor.resolve_conj();
  };
  std::for_each(begin, stack->end(), [&](c10::IValue& value) {
    if (value.isTensor()) value = passed(value.toTensor());
    if (!value.isTensorList()) return;
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(passed(tensor));
    value = std::move(tensors);
  });
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

template <c10::DispatchKey kKey>
void register_views(torch::Library& library) {
  for (const char* name :
       {"_allgather_base_", "_reduce_scatter_base_", "allgather_", "allgather_coalesced_",
        "allgather_into_tensor_coalesced_", "allreduce_", "allreduce_coalesced_", "alltoall_",
        "alltoall_base_", "broadcast_", "gather_", "recv_", "recv_any_source_", "reduce_",
        "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "scatter_", "send"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&pass_views<kKey>>());
}

}  // namespace

c10::intrusive_ptr<ProcessGroupRingcomm> ringcomm_group_of(const std::string& group_name,
                                                           const at::Tensor& tensor,
                                                           const char* op) {
  const auto group = c10d::resolve_process_group(group_name);
  const auto ringcomm = find_ringcomm(*group, tensor);
  if (ringcomm != nullptr) return ringcomm;
  const auto other = backend_for(*group, tensor.device().type());
  TORCH_CHECK_VALUE(false, "ringcomm: ", op, " needs a group with backend ringcomm for ",
                    tensor.device(), ", got one with ",
                    other != nullptr ? other->getBackendName() : "none");
}

TORCH_LIBRARY(ringcomm, m) {
  define(m, "all_reduce_(Tensor(a!) input, str reduce_op, str group_name) -> ()", all_reduce_);
  define(m, "all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor", all_reduce);
  define(m, "all_reduce_into(Tensor input, Tensor(a!) out, str reduce_op, str group_name) -> ()",
         all_reduce_into);
  define(m, "reduce_scatter(Tensor input, str reduce_op, str group_name) -> Tensor",
         reduce_scatter);
  define(m, "all_gather(Tensor input, str group_name) -> Tensor", all_gather);
  define(m, "broadcast_(Tensor(a!) input, int src, str group_name) -> ()", broadcast_);
  define(m, "broadcast(Tensor input, int src, str group_name) -> Tensor", broadcast);
  define(m, "reduce(Tensor input, int dst, str reduce_op, str group_name) -> Tensor", reduce);
  define(m, "ring_all_reduce_(Tensor(a!) input, str group_name) -> ()", ring_all_reduce_);
  m.def("merge_softmax_stats(Tensor stats, str group_name) -> Tensor");
  m.impl("merge_softmax_stats", c10::DispatchKey::CPU, merge_softmax_stats);
  m.def(
      "all_reduce_add_rms_norm_(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps, "
      "str group_name) -> ()");
  m.impl("all_reduce_add_rms_norm_", c10::DispatchKey::CPU, all_reduce_add_rms_norm_);
}

TORCH_LIBRARY_IMPL(ringcomm, Autograd, m) {
  m.impl("all_reduce_", refuse_grad("all_reduce, or "));
  m.impl("all_reduce_into", refuse_grad("all_reduce without out=, or "));
  m.impl("broadcast_", refuse_grad("broadcast, or "));
  m.impl("ring_all_reduce_", refuse_grad("all_reduce, or "));
  m.impl("all_reduce_add_rms_norm_", refuse_grad("torch.inference_mode(), or "));
  m.impl("reduce_scatter_update_all_gather_", refuse_grad());
}

TORCH_LIBRARY_IMPL(c10d, Negative, library) { register_views<c10::DispatchKey::Negative>(library); }

TORCH_LIBRARY_IMPL(c10d, Conjugate, library) {
  register_views<c10::DispatchKey::Conjugate>(library);
}

// Each returns None, or False, where torch.ops.ringcomm must be called.
void define_eager_ops(py::module_& m) {
  m.def("all_reduce", &eager_all_reduce);
  m.def("reduce_scatter", eager(&reduce_scatter));
  m.def("all_gather", eager(&all_gather));
  m.def("all_reduce_add_rms_norm_", &eager_norm);
  // Arguments of other types: the dispatcher's errors are torch's.
  m.def("all_reduce_add_rms_norm_", [](const py::args&) { return false; });
  for (const char* name : {"all_reduce", "reduce_scatter", "all_gather"})
    m.def(name, [](const py::args&) { return py::none(); });
}

}  // namespace ringcomm
