#pragma once

#include <chrono>
#include <cstddef>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "collectives/communicator_options.h"

namespace ringcomm {

/// A group's options in c10d's form, which split_group copies to the new group.
struct GroupOptions final : c10d::Backend::Options {
  CommunicatorOptions engine;
  /// In place of the engine's, where tensors of a device go over messages.
  std::size_t device_slot_bytes = std::size_t{4} << 20;

  GroupOptions(const CommunicatorOptions& engine_options, std::chrono::milliseconds timeout)
      : Options("ringcomm", timeout), engine(engine_options) {}
};

}  // namespace ringcomm
