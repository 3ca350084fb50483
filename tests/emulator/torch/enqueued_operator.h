#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace ringcomm::emulator {

/// The same memory as a CPU tensor. Whoever uses it minds the stream.
at::Tensor seen_by_host(const at::Tensor& tensor);

/// Has the operator calculated by torch's CPU kernels on the current stream, when that has come so
/// far, and puts its results on the stack at once.
///
/// Returns false, with nothing done, where results cannot be known to that extent in advance (their
/// shapes depend on data, they are random or no tensors), or there is no such call: the caller then
/// waits for the stream.
bool enqueue_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace ringcomm::emulator
