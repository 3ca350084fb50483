#include "bindings/tensor_call.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "bindings/tensors.h"

namespace ringcomm {
namespace {

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// Outputs that share memory cannot all hold their results. Tensors with gaps between elements are
// not checked, because they may interleave without overlap (columns of a matrix).
void check_outputs_disjoint(const std::vector<at::Tensor>& tensors) {
  std::vector<std::pair<const char*, const char*>> ranges;
  for (const at::Tensor& tensor : tensors) {
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    if (tensor.nbytes() > 0 && tensor.is_non_overlapping_and_dense())
      ranges.emplace_back(begin, begin + tensor.nbytes());
  }
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t i = 1; i < ranges.size(); ++i)
    TORCH_CHECK_VALUE(ranges[i - 1].second <= ranges[i].first,
                      "ringcomm: two outputs share memory, so it cannot hold both results");
}

}  // namespace

void TensorCall::link() {
  call.inputs = inputs.data();
  call.outputs = outputs.data();
  call.input_elems = input_elems.empty() ? nullptr : input_elems.data();
  call.output_elems = output_elems.empty() ? nullptr : output_elems.data();
  call.update = update.get();
}

void TensorCall::take_even_size() {
  const std::size_t size = input_elems.front();
  const auto is_alike = [&](std::size_t elems) { return elems == size; };
  if (!std::all_of(input_elems.begin(), input_elems.end(), is_alike) ||
      !std::all_of(output_elems.begin(), output_elems.end(), is_alike))
    return;
  call.num_elems = size;
  input_elems.clear();
  output_elems.clear();
}

c10::Device device_of(const std::vector<TensorCall>& calls, const std::vector<at::Tensor>& results,
                      const char* title) {
  std::optional<c10::Device> device;
  const auto add = [&](const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (!device) device = tensor.device();
      TORCH_CHECK_VALUE(tensor.device() == *device, title, " got tensors on ", *device, " and on ",
                        tensor.device(), "; all tensors of a call must be on one device");
    }
  };
  for (const TensorCall& item : calls) {
    add(item.kept);
    add(item.profiled);
  }
  add(results);
  return device.value_or(c10::Device(c10::kCPU));
}

int checked_rank(int64_t rank, int world_size, const char* what) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < world_size, "ringcomm: ", what, " is ", rank,
                    ", not a rank of a group of ", world_size);
  return static_cast<int>(rank);
}

at::Tensor as_real(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (!tensor.is_complex()) return tensor;
  TORCH_CHECK_VALUE(c10d::isComplexViewAsRealAllowed(op),
                    "ringcomm: complex tensors can be summed, averaged and premultiplied only");
  return at::view_as_real(tensor);
}

at::Tensor plain(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous();
}

void check_no_overlap(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                    "ringcomm: an output of shape ", tensor.sizes(), " and strides ",
                    tensor.strides(),
                    " has several elements at one memory location (an expanded tensor?), so it "
                    "cannot hold their results; pass a clone()");
}

Writable::Writable(const at::Tensor& tensor, TensorCall& item, bool is_input_too)
    : buffer_(is_plain(tensor) ? tensor
              : is_input_too   ? plain(tensor)
                               : at::empty_like(tensor, at::MemoryFormat::Contiguous)) {
  check_no_overlap(tensor);
  item.kept.push_back(tensor);
  if (is_input_too) item.profiled.push_back(tensor);
  if (buffer_.is_same(tensor)) return;
  item.kept.push_back(buffer_);
  item.finish = [previous = std::move(item.finish), tensor, buffer = buffer_] {
    if (previous) previous();
    copy_back(tensor, buffer);
  };
}

const void* readable(const at::Tensor& tensor, TensorCall& item) {
  item.profiled.push_back(tensor);
  item.kept.push_back(plain(tensor));
  return item.kept.back().data_ptr();
}

void add_inputs(const std::vector<at::Tensor>& tensors, std::size_t element_bytes,
                TensorCall& item) {
  for (const at::Tensor& tensor : tensors) {
    item.inputs.push_back(readable(tensor, item));
    item.input_elems.push_back(tensor.nbytes() / element_bytes);
  }
}

void add_outputs(const std::vector<at::Tensor>& tensors, std::size_t element_bytes,
                 TensorCall& item) {
  check_outputs_disjoint(tensors);
  for (const at::Tensor& tensor : tensors) {
    item.outputs.push_back(Writable(tensor, item, false).buffer().data_ptr());
    item.output_elems.push_back(tensor.nbytes() / element_bytes);
  }
}

void add_rows(const at::Tensor& buffer, const std::vector<int64_t>& splits, int world_size,
              const char* what, const std::function<void(void*, std::size_t)>& add) {
  TORCH_CHECK_VALUE(buffer.dim() > 0, "ringcomm: all_to_all_single splits its ", what,
                    " along dimension 0, which a scalar does not have");
  const int64_t num_rows = buffer.size(0);
  std::vector<int64_t> rows = splits;
  if (rows.empty()) {
    TORCH_CHECK_VALUE(num_rows % world_size == 0, "ringcomm: all_to_all_single cannot split the ",
                      num_rows, " rows of its ", what, " evenly for ", world_size,
                      " ranks; pass split sizes");
    rows.assign(static_cast<std::size_t>(world_size), num_rows / world_size);
  }
  TORCH_CHECK_VALUE(rows.size() == static_cast<std::size_t>(world_size),
                    "ringcomm: all_to_all_single needs one split size of its ", what,
                    " for each of the ", world_size, " ranks, got ", rows.size());
  int64_t begin_row = 0;
  const std::size_t row_bytes =
      num_rows == 0 ? 0 : buffer.nbytes() / static_cast<std::size_t>(num_rows);
  for (const int64_t share_rows : rows) {
    TORCH_CHECK_VALUE(share_rows >= 0 && share_rows <= num_rows - begin_row,
                      "ringcomm: all_to_all_single: the split sizes of its ", what, ", ",
                      at::IntArrayRef(rows), ", do not fit its ", num_rows, " rows");
    add(offset(buffer.data_ptr(), static_cast<std::size_t>(begin_row) * row_bytes),
        static_cast<std::size_t>(share_rows) * row_bytes);
    begin_row += share_rows;
  }
  TORCH_CHECK_VALUE(begin_row == num_rows, "ringcomm: all_to_all_single: the split sizes of its ",
                    what, ", ", at::IntArrayRef(rows), ", add up to ", begin_row,
                    ", but there are ", num_rows, " rows");
}

}  // namespace ringcomm
