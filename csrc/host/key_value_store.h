#pragma once

#include <memory>
#include <optional>
#include <string>

namespace ringcomm {

/// What the library needs of a store that all ranks of a group share (an adapter to torch's Store).
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  /// All but is_interrupted() throw std::exception when the store cannot be reached.
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Nothing when the key is not there now.
  virtual std::optional<std::string> try_get(const std::string& key) = 0;
  /// Sets the key if it is not there yet; where the store cannot tell, in any case.
  virtual void set_first(const std::string& key, const std::string& value) = 0;
  /// Whether a signal has asked this process to stop waiting.
  virtual bool is_interrupted() { return false; }
  /// The same store for another thread: with a connection of its own, where it has connections.
  virtual std::unique_ptr<KeyValueStore> clone() = 0;
};

}  // namespace ringcomm
