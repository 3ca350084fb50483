#pragma once

#include <functional>
#include <thread>

namespace ringcomm {

/// Starts a thread of the library: named `name` (15 characters at most) for debuggers, and with all
/// signals blocked, since those are for the threads of the program, Python's main thread above all.
/// Throws std::system_error that names the thread and says which limit to raise.
std::thread start_background_thread(const char* name, std::function<void()> body);

}  // namespace ringcomm
