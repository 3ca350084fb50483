#include "bindings/files.h"

#include <cstdint>
#include <memory>
#include <string>

#include "storage/file_engine.h"

// For ringcomm/parallel/offload/file_store.py, which keeps the memory of transfers until they end.

namespace ringcomm {
namespace {

namespace py = pybind11;

std::shared_ptr<FileTransfer> start_transfer(FileEngine& engine, bool is_write, int fd,
                                             std::uintptr_t address, std::size_t num_bytes,
                                             std::int64_t offset) {
  return engine.start(is_write, fd, reinterpret_cast<void*>(address), num_bytes, offset);
}

}  // namespace

void bind_files(py::module_& m) {
  py::class_<FileTransfer, std::shared_ptr<FileTransfer>>(m, "FileTransfer")
      .def("wait", &FileTransfer::wait, py::call_guard<py::gil_scoped_release>())
      .def("is_done", &FileTransfer::is_done);
  // Its destructor waits for transfers, none of which needs Python's lock.
  py::class_<FileEngine>(m, "FileEngine")
      .def(py::init<const std::string&, unsigned, std::size_t>(), py::arg("kind"),
           py::arg("queue_depth"), py::arg("block_bytes"))
      .def_static("has_uring", &FileEngine::has_uring)
      .def("start", &start_transfer, py::arg("is_write"), py::arg("fd"), py::arg("address"),
           py::arg("num_bytes"), py::arg("offset"));
}

}  // namespace ringcomm
