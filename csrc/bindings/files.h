#pragma once

#include <torch/csrc/utils/pybind.h>

namespace ringcomm {

/// Adds FileEngine and FileTransfer to the module.
void bind_files(pybind11::module_& m);

}  // namespace ringcomm
