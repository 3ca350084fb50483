#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ringcomm::emulator {

/// This rank's end of a group of the backend emup2p.
c10::intrusive_ptr<c10d::Backend> create_p2p(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                             int size, std::chrono::milliseconds timeout);

}  // namespace ringcomm::emulator
