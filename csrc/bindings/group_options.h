#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "collectives/collective.h"

namespace ringcomm {

/// A group's options in c10d's form, which split_group copies to the new group.
struct GroupOptions final : c10d::Backend::Options {
  CommunicatorOptions engine;

  GroupOptions(const CommunicatorOptions& engine_options, std::chrono::milliseconds timeout)
      : Options("ringcomm", timeout), engine(engine_options) {}
};

}  // namespace ringcomm
