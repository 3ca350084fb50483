#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/losses/torch_softmax_stats.h"
#include "kernels/updates/torch_arguments.h"

namespace py = pybind11;

namespace ringcomm {
namespace {

// The last entry of a rank's stats, for kernels that write it elsewhere.
py::tuple softmax_shard_entry(int64_t vocab_start, int64_t vocab_size, int64_t ignore_index,
                              double logit_scale, double softcap, int64_t num_classes,
                              bool wants_weighted, bool wants_more) {
  const SoftmaxStats entry =
      shard_entry({vocab_start, vocab_size, ignore_index, logit_scale, softcap}, num_classes,
                  wants_weighted, wants_more);
  return py::make_tuple(entry.max, entry.sum, entry.target, entry.weighted, entry.entropy,
                        entry.argmax);
}

// What kernels that are launched from Python take of a step, checked: the weight's factor, -lr, the
// gradient's factor and limit, and the key of random bits. `read`: tensors that are not written.
py::tuple checked_step(const std::string& op, const at::Tensor& weight,
                       const std::optional<at::Tensor>& low, bool is_matrix,
                       const std::vector<at::Tensor>& read, int64_t first_elem,
                       std::optional<double> clip_value, double lr, double weight_decay,
                       double scale, int64_t rounding_seed) {
  const WeightArray array(weight, low, rounding_seed, is_matrix, op.c_str());
  const WeightStep step =
      weight_step_of({lr, weight_decay, scale, clip_value, rounding_seed}, op.c_str());
  check_first_elem(first_elem, op.c_str());
  array.check_writable(read);
  const auto key = static_cast<std::int32_t>(step.key);
  return py::make_tuple(step.decay, step.lr_minus, step.scale, step.clip_value,
                        rounding_seed < 0 ? py::object(py::none()) : py::int_(key));
}

// What Triton compiles a kernel for, in two letters for each argument: the type of a tensor and
// whether it is aligned, the size of an int and whether it is 1 or a multiple of 16, other types.
py::bytes argument_kinds(const py::tuple& arguments) {
  constexpr int kAlignment = 16;
  std::string kinds;
  kinds.reserve(2 * arguments.size());
  for (const py::handle argument : arguments) {
    if (THPVariable_Check(argument.ptr())) {
      const at::Tensor& tensor = THPVariable_Unpack(argument.ptr());
      const auto address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
      kinds += static_cast<char>(tensor.scalar_type());
      kinds += address % kAlignment == 0 ? 'a' : 'u';
    } else if (PyLong_CheckExact(argument.ptr())) {
      const auto value = PyLong_AsLongLong(argument.ptr());
      if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
      kinds += value == static_cast<std::int32_t>(value) ? 'i' : 'l';
      kinds += value == 1 ? '1' : value % kAlignment == 0 ? 'm' : ' ';
    } else {
      kinds.append(Py_TYPE(argument.ptr())->tp_name, 2);
    }
  }
  return kinds;
}

}  // namespace
}  // namespace ringcomm

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "ringcomm's operators that are not communication: torch.ops.ringcomm.*";
  m.def("softmax_shard_entry", &ringcomm::softmax_shard_entry);
  m.def("argument_kinds", &ringcomm::argument_kinds);
  m.def("mark_written", [](const py::args& tensors) {  // of which some may be None
    for (const py::handle tensor : tensors)
      if (!tensor.is_none()) ringcomm::mark_written(THPVariable_Unpack(tensor.ptr()));
  });
  const auto def = [&](const char* name, auto function, const auto&... arguments) {
    m.def(name, torch::wrap_pybind_function(function), arguments...);
  };
  def("checked_step", &ringcomm::checked_step, py::arg("op"), py::arg("weight"), py::arg("low"),
      py::arg("is_matrix"), py::arg("read"), py::arg("first_elem"), py::arg("clip_value"),
      py::arg("lr"), py::arg("weight_decay"), py::arg("scale"), py::arg("rounding_seed") = -1);
  def("ordered_grad", &ringcomm::ordered_grad);
  def("tokens_of", &ringcomm::tokens_of);
  def("check_embedding", &ringcomm::check_embedding);
  def("check_moments", &ringcomm::check_moments);
  def("check_factors", &ringcomm::check_factors);
}
