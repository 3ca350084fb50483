#pragma once

#include <chrono>
#include <string>

namespace ringcomm {

/// What rendezvous needs of a store that all ranks of a group share (torch's Store behind an
/// adapter).
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Waits for the key. False when it does not appear in time.
  virtual bool get(const std::string& key, std::chrono::milliseconds timeout,
                   std::string& value) = 0;
};

}  // namespace ringcomm
