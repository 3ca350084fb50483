#pragma once

#include <stdexcept>
#include <string>

namespace ringcomm::cuda {

/// Why a group's ranks cannot reach each other's GPU memory: the same text on all of them, so that
/// all take the same other way.
class Unavailable : public std::runtime_error {
 public:
  explicit Unavailable(const std::string& reason) : std::runtime_error(reason) {}
};

}  // namespace ringcomm::cuda
