#include "emulator/torch/enqueued_operator.h"

#include <ATen/ATen.h>

#include <optional>
#include <utility>
#include <vector>

#include "emulator/torch/streams.h"

namespace ringcomm::emulator {
namespace {

using at::Tensor;
using torch::jit::Stack;

bool is_predictable(const c10::OperatorHandle& op) {
  for (const c10::Argument& result : op.schema().returns()) {
    const bool is_view = result.alias_info() != nullptr && !result.alias_info()->isWrite();
    if (is_view || result.type()->kind() != c10::TypeKind::TensorType) return false;
  }
  return !op.hasTag(at::Tag::nondeterministic_seeded) &&
         !op.hasTag(at::Tag::dynamic_output_shape) && !op.hasTag(at::Tag::data_dependent_output);
}

/// Numbers are CPU tensors of no dimensions, which operators take as they are.
bool is_number(const Tensor& tensor) { return tensor.is_cpu() && tensor.dim() == 0; }

/// The device of all tensors among the arguments but numbers.
struct DeviceSearch {
  std::optional<c10::Device> device;
  bool is_one = true;

  void see(const Tensor& tensor) {
    if (is_number(tensor)) return;
    is_one &= tensor.device().type() == kEmulatedGpu && tensor.layout() == at::kStrided &&
              device.value_or(tensor.device()) == tensor.device();
    device = tensor.device();
  }
};

/// The arguments with `change` applied to each tensor; nothing where there is a device among them.
template <class Change>
std::optional<Stack> with_tensors(c10::ArrayRef<c10::IValue> arguments, Change change) {
  const auto changed = [&](const Tensor& tensor) {
    return tensor.defined() ? change(tensor) : tensor;
  };
  Stack stack;
  for (const c10::IValue& argument : arguments) {
    if (argument.isDevice()) return std::nullopt;
    if (argument.isTensor()) {
      stack.emplace_back(changed(argument.toTensor()));
    } else if (argument.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : argument.toTensorVector()) tensors.push_back(changed(tensor));
      stack.emplace_back(std::move(tensors));
    } else if (argument.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const std::optional<Tensor>& tensor : argument.toOptionalTensorVector())
        tensors.push_back(tensor.has_value() ? std::optional(changed(*tensor)) : std::nullopt);
      stack.emplace_back(std::move(tensors));
    } else {
      stack.push_back(argument);
    }
  }
  return stack;
}

Tensor shape_of(const Tensor& tensor) {
  if (is_number(tensor)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

/// What the stream will use: the host may change its own numbers meanwhile.
Tensor operand(const Tensor& tensor) {
  if (!is_number(tensor)) return seen_by_host(tensor);
  Tensor number = tensor.clone();
  // Those of Python do not take part in type promotion as others do.
  number.unsafeGetTensorImpl()->set_wrapped_number(
      tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return number;
}

/// Calls the operator on shapes; nothing where it refuses, or wants to change an argument's shape.
std::optional<Stack> predict(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  std::vector<std::pair<Tensor, Tensor>> shapes;
  std::optional<Stack> stack = with_tensors(arguments, [&](const Tensor& tensor) {
    return shapes.emplace_back(tensor, shape_of(tensor)).second;
  });
  if (!stack.has_value()) return std::nullopt;
  try {
    op.callBoxed(&*stack);
  } catch (const std::exception&) {
    return std::nullopt;  // the caller finds out why
  }
  for (const auto& [tensor, shape] : shapes)
    if (tensor.sizes() != shape.sizes() || tensor.strides() != shape.strides()) return std::nullopt;
  return stack;
}

/// The argument that the operator writes and returns as this result; null for a new tensor.
const c10::IValue* written_argument(const c10::FunctionSchema& schema, const c10::Argument& result,
                                    c10::ArrayRef<c10::IValue> arguments) {
  if (result.alias_info() == nullptr) return nullptr;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && *alias == *result.alias_info()) return &arguments[i];
  }
  return nullptr;
}

/// What the call returns: arguments that it writes, and new tensors that the stream fills. Nothing
/// where that is not known.
std::optional<Stack> make_results(const c10::OperatorHandle& op,
                                  c10::ArrayRef<c10::IValue> arguments, c10::Device device) {
  Stack results;
  bool are_written = true;  // tensors of the right shape; those without elements may be to grow
  for (const c10::Argument& result : op.schema().returns()) {
    const c10::IValue* argument = written_argument(op.schema(), result, arguments);
    are_written &= argument != nullptr && argument->toTensor().numel() != 0;
    results.push_back(argument != nullptr ? *argument : c10::IValue());
  }
  if (are_written) return results;  // as most are: torch allocates, and calls the form with out=
  const std::optional<Stack> shapes = predict(op, arguments);
  if (!shapes.has_value()) return std::nullopt;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (results[i].isTensor()) continue;
    const Tensor& shape = (*shapes)[i].toTensor();
    results[i] = !shape.defined() ? shape
                                  : at::empty_strided(shape.sizes(), shape.strides(),
                                                      shape.options().device(device));
  }
  return results;
}

/// Runs on the stream. `results` is the memory of what was returned.
void calculate(const c10::OperatorHandle& op, Stack operands, const std::vector<Tensor>& results) {
  const at::NoGradGuard no_grad;
  op.callBoxed(&operands);
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) continue;
    const Tensor& calculated = operands[i].toTensor();
    TORCH_CHECK(calculated.sizes() == results[i].sizes(), op.operator_name(),
                " changes the shape of its result, which emugpu does not have");
    if (calculated.const_data_ptr() != results[i].const_data_ptr()) results[i].copy_(calculated);
  }
}

}  // namespace

Tensor seen_by_host(const Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

bool enqueue_operator(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  DeviceSearch found;
  const std::optional<Stack> operands = with_tensors(arguments, [&](const Tensor& tensor) {
    found.see(tensor);
    return tensor;
  });
  if (!is_predictable(op) || !operands.has_value() || !found.device.has_value() || !found.is_one)
    return false;
  std::optional<Stack> results = make_results(op, arguments, *found.device);
  if (!results.has_value()) return false;

  std::vector<Tensor> memory;
  for (const c10::IValue& result : *results)
    memory.push_back(result.toTensor().defined() ? seen_by_host(result.toTensor()) : Tensor());
  launch_operator(current_stream(found.device->index()),
                  [op, operands = *with_tensors(arguments, operand), memory] {
                    calculate(op, operands, memory);
                  });
  torch::jit::drop(*stack, schema.arguments().size());
  for (c10::IValue& result : *results) stack->push_back(std::move(result));
  return true;
}

}  // namespace ringcomm::emulator
