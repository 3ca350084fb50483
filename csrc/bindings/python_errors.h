#pragma once

#include <chrono>
#include <exception>
#include <functional>

namespace ringcomm {

/// Whether a Python signal handler raised an exception (Ctrl-C); it is kept for
/// with_python_errors(). For threads that wait without the GIL. Only Python's main thread runs
/// handlers; other threads get false immediately.
bool is_interrupted();

/// The same error as an exception that torch translates to Python's types: ringcomm::Error to the
/// children of ringcomm.RingcommError, std::invalid_argument to ValueError; others as they are.
/// Takes the GIL.
std::exception_ptr to_python(const std::exception_ptr& error);

/// Throws the error of a wait with a timeout; `what` continues.
[[noreturn]] void throw_wait_timeout(const char* what, std::chrono::milliseconds timeout);

/// Keeps the exception that Python raises now, as one of a signal handler.
void keep_interruption();

/// Throws what a signal handler raised during is_interrupted() in this thread, and forgets it.
/// Returns if there is nothing.
void rethrow_interruption();

/// Runs `body` and converts its exceptions with to_python(). An exception of a signal handler
/// during the call takes precedence, also if `body` succeeds, so that Ctrl-C is not lost.
template <class Body>
void with_python_errors(const Body& body) {
  try {
    body();
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    rethrow_interruption();
    std::rethrow_exception(to_python(error));
  }
  rethrow_interruption();
}

/// Tells the peers which exception this thread handles, if any: of a group that is destroyed in
/// `finally`, that is the reason.
void report_handled_exception();

/// Runs `body` without Python's lock, which the caller may hold or not: for what waits for threads
/// that may need it.
void without_gil(const std::function<void()>& body);

}  // namespace ringcomm
