#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace ringcomm {

/// The interface that the rendezvous needs of a store that all ranks of a group share (an adapter
/// to torch's Store).
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;
  /// False when the key is not there now. Throws std::exception when the store cannot be reached.
  virtual bool try_get(const std::string& key, std::string& value) = 0;
  /// Adds to the number at the key (0 if it is missing) and returns the sum.
  virtual std::int64_t add(const std::string& key, std::int64_t number) = 0;
  /// Sets the key if it is not there yet; where the store cannot tell, in any case.
  virtual void set_first(const std::string& key, const std::string& value) = 0;
  /// Whether a signal has asked this process to stop waiting: for loops that use try_get().
  virtual bool is_interrupted() { return false; }
  /// The same store for another thread: with a connection of its own, where it has connections.
  virtual std::unique_ptr<KeyValueStore> clone() = 0;
};

}  // namespace ringcomm
