#pragma once

#include <exception>
#include <functional>

namespace ringcomm {

/// Whether a signal handler of Python wants the program to stop (Ctrl-C); what it raised is kept
/// for with_python_errors(). For threads that wait without the GIL; Python's main thread alone runs
/// handlers, so others are told no at once.
bool is_interrupted();

/// The same error as an exception that torch translates to Python's types: ringcomm::Error to the
/// children of ringcomm.RingcommError, std::invalid_argument to ValueError; others as they are.
/// Takes the GIL.
std::exception_ptr to_python(const std::exception_ptr& error);

/// Throws what a signal handler raised during is_interrupted() in this thread, and forgets it.
/// Returns if there is nothing.
void rethrow_interruption();

/// Runs `body`; what it throws leaves as to_python() of it. What a signal handler raised meanwhile
/// goes first, also when `body` succeeds: Ctrl-C must not be lost.
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

/// Runs `body` without Python's lock, which the caller may hold or not: for what waits for threads
/// that may need it.
void without_gil(const std::function<void()>& body);

}  // namespace ringcomm
