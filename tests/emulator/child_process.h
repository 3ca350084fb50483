#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ringcomm::emulator::testing {

/// Longer than anything takes on a loaded machine under ThreadSanitizer.
inline constexpr std::chrono::seconds kBound{60};

using Environment = std::map<std::string, std::string>;

/// A process of this program that runs one function, as a rank of a test does. It starts by exec,
/// so that it has a driver of its own, is killed with its parent, and ends after kBound.
class ChildProcess {
 public:
  ChildProcess(const std::string& function, const Environment& environment = {});
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  /// Messages between the two, in order. An empty one arrives as one byte; what is received is
  /// empty if the other is gone, or after kBound.
  void send(const std::vector<char>& message, int fd = -1);
  std::vector<char> receive(int* fd = nullptr);

  /// Its exit status, or minus the signal that ended it. Once, and not after kill().
  int wait();
  /// And waits for its end.
  void kill();

 private:
  pid_t pid_ = -1;
  int socket_ = -1;
};

/// Inside a child.
void send_to_parent(const std::vector<char>& message, int fd = -1);
std::vector<char> receive_from_parent(int* fd = nullptr);

/// Ends the process with a message unless the condition holds.
void must(bool condition, const char* what);
#define MUST(condition) ::ringcomm::emulator::testing::must((condition), #condition)

template <class T>
std::vector<char> as_message(const T& value) {
  const char* bytes = reinterpret_cast<const char*>(&value);
  return {bytes, bytes + sizeof(T)};
}
template <class T>
T from_message(const std::vector<char>& message) {
  T value = {};
  must(message.size() == sizeof(T), "a message of the right size");
  for (std::size_t i = 0; i < sizeof(T); ++i) reinterpret_cast<char*>(&value)[i] = message[i];
  return value;
}

/// Registers a function that children run: RINGCOMM_CHILD(name) { ... }
struct ChildFunction {
  ChildFunction(const char* name, void (*function)());
};
#define RINGCOMM_CHILD(name)                                                                 \
  void child_##name();                                                                       \
  const ::ringcomm::emulator::testing::ChildFunction registered_##name(#name, child_##name); \
  void child_##name()

/// Runs the function that the parent named, if this process is a child; returns whether it was.
bool run_child(int argc, char** argv);

}  // namespace ringcomm::emulator::testing
