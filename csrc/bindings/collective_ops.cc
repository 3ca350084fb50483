#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "bindings/op_support.h"

// torch.ops.ringcomm.*: collectives as torch operators, so that torch.compile sees them. Fakes,
// autograd and wrappers are in ringcomm/ops, in the same order. They run over any backend of
// torch.distributed; the explicit ring needs ringcomm.

// _allgather_base and _reduce_scatter_base have new names since torch 2.13, which 2.11 does not
// know.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace ringcomm {
namespace {

c10d::ReduceOp reduce_op_from(const std::string& name) {
  using Op = c10d::ReduceOp;
  static constexpr std::pair<std::string_view, Op::RedOpType> kReductions[] = {
      {"sum", Op::SUM}, {"avg", Op::AVG},   {"product", Op::PRODUCT}, {"min", Op::MIN},
      {"max", Op::MAX}, {"band", Op::BAND}, {"bor", Op::BOR},         {"bxor", Op::BXOR}};
  for (const auto& [known, op] : kReductions)
    if (name == known) return op;
  TORCH_CHECK_VALUE(false, "ringcomm: unknown reduction '", name,
                    "'; known are sum, avg, product, min, max, band, bor and bxor");
}

template <class Options>
Options synchronous() {
  Options options;
  options.asyncOp = false;
  return options;
}

void wait_for(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work != nullptr) work->wait();
}

at::Tensor contiguous_copy(const at::Tensor& input) {
  return input.clone(at::MemoryFormat::Contiguous);
}

void all_reduce_(const at::Tensor& input, const std::string& reduce_op,
                 const std::string& group_name) {
  check_no_grad(input, "all_reduce_", "all_reduce");
  auto options = synchronous<c10d::AllreduceOptions>();
  options.reduceOp = reduce_op_from(reduce_op);
  std::vector<at::Tensor> tensors = {input};
  wait_for(group_of(group_name)->allreduce(tensors, options));
  mark_written(input);
}

// Returns nothing, because torch.compile cannot functionalize an operator that returns an alias of
// an argument.
void all_reduce_into(const at::Tensor& input, const at::Tensor& out, const std::string& reduce_op,
                     const std::string& group_name) {
  TORCH_CHECK_VALUE(!(input.requires_grad() && at::GradMode::is_enabled()),
                    "ringcomm: all_reduce with out= has no gradient, and its input requires grad; "
                    "leave out out=, or use torch.no_grad()");
  check_no_grad(out, "all_reduce with out=", "all_reduce without it");
  TORCH_CHECK_VALUE(input.sizes() == out.sizes(), "ringcomm: all_reduce of a tensor of shape ",
                    input.sizes(), " into one of shape ", out.sizes());
  TORCH_CHECK_TYPE(input.scalar_type() == out.scalar_type(), "ringcomm: all_reduce of ",
                   input.scalar_type(), " into ", out.scalar_type());
  at::assert_no_partial_overlap(input, out);
  if (input.is_alias_of(out) && input.data_ptr() == out.data_ptr() &&
      input.strides() == out.strides()) {
    all_reduce_(out, reduce_op, group_name);
  } else if (const auto ringcomm = find_ringcomm(*group_of(group_name), out)) {
    ringcomm->all_reduce_into(input, out, reduce_op_from(reduce_op));
    mark_written(out);
  } else {
    out.copy_(input);
    all_reduce_(out, reduce_op, group_name);
  }
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
  const auto group = group_of(group_name);
  const int64_t world_size = group->getSize();
  TORCH_CHECK_VALUE(input.dim() > 0 && input.size(0) % world_size == 0,
                    "ringcomm: reduce_scatter needs an input whose dimension 0 is a multiple of ",
                    world_size, ", got shape ", input.sizes());
  auto options = synchronous<c10d::ReduceScatterOptions>();
  options.reduceOp = reduce_op_from(reduce_op);
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes[0] /= world_size;
  at::Tensor output = at::empty(sizes, input.options());
  at::Tensor contiguous = input.detach().contiguous();
  wait_for(group->_reduce_scatter_base(output, contiguous, options));
  return output;
}

at::Tensor all_gather(const at::Tensor& input, const std::string& group_name) {
  const auto group = group_of(group_name);
  TORCH_CHECK_VALUE(
      input.dim() > 0,
      "ringcomm: all_gather concatenates along dimension 0, which a scalar does not have");
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes[0] *= group->getSize();
  at::Tensor output = at::empty(sizes, input.options());
  at::Tensor contiguous = input.detach().contiguous();
  wait_for(group->_allgather_base(output, contiguous, synchronous<c10d::AllgatherOptions>()));
  return output;
}

void broadcast_(const at::Tensor& input, int64_t src, const std::string& group_name) {
  check_no_grad(input, "broadcast_", "broadcast");
  auto options = synchronous<c10d::BroadcastOptions>();
  options.rootRank = src;
  std::vector<at::Tensor> tensors = {input};
  wait_for(group_of(group_name)->broadcast(tensors, options));
  mark_written(input);
}

at::Tensor broadcast(const at::Tensor& input, int64_t src, const std::string& group_name) {
  const at::Tensor output = contiguous_copy(input.detach());
  broadcast_(output, src, group_name);
  return output;
}

at::Tensor reduce(const at::Tensor& input, int64_t dst, const std::string& reduce_op,
                  const std::string& group_name) {
  const auto group = group_of(group_name);
  auto options = synchronous<c10d::ReduceOptions>();
  options.reduceOp = reduce_op_from(reduce_op);
  options.rootRank = dst;
  const at::Tensor output = contiguous_copy(input.detach());
  std::vector<at::Tensor> tensors = {output};
  wait_for(group->reduce(tensors, options));
  return group->getRank() == dst ? output : at::zeros_like(output);
}

void ring_all_reduce_(const at::Tensor& input, const std::string& group_name) {
  check_no_grad(input, "ring_all_reduce_", "all_reduce");
  ringcomm_group_of(group_name, input, "ring_all_reduce_")->ring_all_reduce(input);
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

}  // namespace

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
}

}  // namespace ringcomm
