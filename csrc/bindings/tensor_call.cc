#include "bindings/tensor_call.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

#include <utility>

#include "bindings/tensors.h"

namespace ringcomm {
namespace {

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

void TensorCall::link() {
  call.inputs = inputs.data();
  call.outputs = outputs.data();
  call.input_elems = input_elems.empty() ? nullptr : input_elems.data();
  call.output_elems = output_elems.empty() ? nullptr : output_elems.data();
  call.update = update.get();
}

int checked_rank(int64_t rank, int world_size, const char* what) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < world_size, "ringcomm: ", what, " is ", rank,
                    ", not a rank of a group of ", world_size);
  return static_cast<int>(rank);
}

at::Tensor as_real(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (!tensor.is_complex()) return tensor;
  TORCH_CHECK_VALUE(c10d::isComplexViewAsRealAllowed(op),
                    "ringcomm: complex tensors can be summed and averaged only");
  return at::view_as_real(tensor);
}

at::Tensor plain(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous();
}

void check_no_overlap(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                    "ringcomm: an output of shape ", tensor.sizes(), " and strides ",
                    tensor.strides(),
                    " has several elements at one memory location (an expanded tensor?), which "
                    "cannot hold their results; pass a clone()");
}

Writable::Writable(const at::Tensor& tensor, TensorCall& item, bool is_input_too)
    : buffer_(is_plain(tensor) ? tensor
              : is_input_too   ? plain(tensor)
                               : at::empty_like(tensor, at::MemoryFormat::Contiguous)) {
  check_no_overlap(tensor);
  item.kept.push_back(tensor);
  if (buffer_.is_same(tensor)) return;
  item.kept.push_back(buffer_);
  item.finish = [previous = std::move(item.finish), tensor, buffer = buffer_] {
    if (previous) previous();
    copy_back(tensor, buffer);
  };
}

const void* readable(const at::Tensor& tensor, TensorCall& item) {
  item.kept.push_back(plain(tensor));
  return item.kept.back().data_ptr();
}

}  // namespace ringcomm
