#include "bindings/python_errors.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <unistd.h>

#include <optional>
#include <stdexcept>
#include <utility>

#include "core/errors.h"
#include "transport/transport.h"

namespace py = pybind11;

namespace ringcomm {
namespace {

const char* class_name_of(ErrorKind kind) {
  return kind == ErrorKind::kMismatch   ? "MismatchError"
         : kind == ErrorKind::kPeerDied ? "PeerDiedError"
         : kind == ErrorKind::kTimeout  ? "CollectiveTimeoutError"
                                        : "RingcommError";
}

python_error make_python_error(const Error& error) {
  const py::gil_scoped_acquire gil;
  const ErrorInfo& info = error.info();
  python_error made;
  made.message = error.what();
  try {
    // Python makes an object of class and arguments at each raise. An object here would be kept by
    // futures, with the frames that it has been raised through, which may hold the future.
    made.value = py::make_tuple(made.message, info.rank, info.host, info.pid, info.op, info.seq)
                     .release()
                     .ptr();
    const py::object type = py::module_::import("ringcomm.errors").attr(class_name_of(info.kind));
    made.type = type.inc_ref().ptr();
  } catch (py::error_already_set& failed) {
    failed.restore();  // the import system may be gone: another error is better than none
    made.persist();
  }
  return made;
}

// The exception of a signal handler; of the main thread only, and empty outside calls.
thread_local std::optional<python_error> raised;

}  // namespace

bool is_interrupted() {
  if (::gettid() != ::getpid() || !Py_IsInitialized()) return false;
  if (raised.has_value()) return true;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return false;
  keep_interruption();
  return true;
}

void keep_interruption() { raised.emplace().persist(); }

void rethrow_interruption() {
  if (!raised.has_value()) return;
  python_error error = std::move(*raised);
  raised.reset();
  throw error;
}

void throw_wait_timeout(const char* what, std::chrono::milliseconds timeout) {
  throw Error({.kind = ErrorKind::kTimeout, .op = what},
              c10::str("ringcomm: ", what, " did not complete within wait(", timeout.count(),
                       " ms); the call continues, so you can wait for it again"));
}

void report_handled_exception() {
  if (!Py_IsInitialized()) return;
  const py::gil_scoped_acquire gil;
  try {
    py::module_::import("ringcomm.backend").attr("report_handled_exception")();
  } catch (py::error_already_set&) {
    // Leaving goes on without it.
  }
}

void without_gil(const std::function<void()>& body) {
  if (!Py_IsInitialized() || !PyGILState_Check()) return body();
  const py::gil_scoped_release released;
  body();
}

std::exception_ptr to_python(const std::exception_ptr& error) try {
  try {
    std::rethrow_exception(error);
  } catch (const Error& engine_error) {
    if (!Py_IsInitialized()) throw;  // nobody will see it
    throw make_python_error(engine_error);
  } catch (const Unsupported& unsupported) {
    C10_THROW_ERROR(NotImplementedError, std::string("ringcomm: ") + unsupported.what());
  } catch (const std::invalid_argument& wrong) {
    C10_THROW_ERROR(ValueError, std::string("ringcomm: ") + wrong.what());
  }
} catch (...) {
  return std::current_exception();
}

}  // namespace ringcomm
