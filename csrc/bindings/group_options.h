#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "collectives/communicator_options.h"

namespace ringcomm {

/// What a group was made with, in c10d's form: what split_group copies and hands on.
struct GroupOptions final : c10d::Backend::Options {
  CommunicatorOptions engine;

  GroupOptions(const CommunicatorOptions& engine_options, std::chrono::milliseconds timeout)
      : Options("ringcomm", timeout), engine(engine_options) {}
};

}  // namespace ringcomm
