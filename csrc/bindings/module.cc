#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "bindings/files.h"
#include "bindings/process_group.h"
#include "bindings/shared_tensors.h"
#include "collectives/collective.h"
#include "collectives/stats.h"
#include "collectives/trace.h"
#include "reduce/reduce_op.h"
#include "transport/cgroup_limits.h"
#include "transport/shm/bootstrap.h"
#include "transport/shm/shared_arena.h"

namespace py = pybind11;

namespace ringcomm {
namespace {

c10::intrusive_ptr<c10d::Backend> create_process_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout, const std::string& algorithm, bool is_rank_ordered,
    std::uint32_t num_slots, std::size_t slot_bytes, std::size_t one_shot_max_bytes,
    const std::string& transport, const std::string& p2p_backend, std::size_t device_slot_bytes,
    const std::string& group_name, const std::vector<uint64_t>& global_ranks) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, "ringcomm: rank ", rank, " is not in a group of ",
                    size, " ranks; ranks are 0 to ", size - 1);
  CommunicatorOptions options;
  options.algorithm = algorithm_from_name(algorithm);
  options.is_rank_ordered = is_rank_ordered;
  options.num_slots = num_slots;
  options.slot_bytes = slot_bytes;
  options.device_slot_bytes = device_slot_bytes;
  options.one_shot_max_bytes = one_shot_max_bytes;
  options.transport = transport;
  options.p2p_backend = p2p_backend;
  auto group_options = c10::make_intrusive<GroupOptions>(options, timeout);
  group_options->group_name = group_name;
  group_options->global_ranks_in_group = global_ranks;
  return c10::make_intrusive<ProcessGroupRingcomm>(store, rank, size, std::move(group_options));
}

ProcessGroupRingcomm& process_group_of(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto* group = dynamic_cast<ProcessGroupRingcomm*>(backend.get());
  TORCH_CHECK_VALUE(group != nullptr, "ringcomm: this group's backend is ",
                    backend->getBackendName(), ", not ringcomm");
  return *group;
}

std::shared_ptr<Communicator> communicator_of(const c10::intrusive_ptr<c10d::Backend>& backend) {
  return process_group_of(backend).communicator();
}

// The usage of memory that peers can map.
py::dict shared_memory_usage() {
  const shm::SharedArena* arena = shm::SharedArena::find();
  const shm::SharedArena::Usage usage =
      arena != nullptr ? arena->usage() : shm::SharedArena::Usage{};
  py::dict result;
  result["num_blocks"] = usage.num_blocks;
  result["allocated_bytes"] = usage.allocated_bytes;
  result["kept_bytes"] = usage.kept_bytes;
  result["num_regions"] = usage.num_regions;
  result["mapped_bytes"] = usage.mapped_bytes;
  return result;
}

// {"cpu_cores": (2.0, "/sys/fs/cgroup/cpu.max"), "memory_bytes": None}
py::dict cgroup_limits_of(const std::string& proc, const std::string& cgroups) {
  const CgroupLimits limits = read_cgroup_limits(proc, cgroups);
  py::dict result;
  result["cpu_cores"] = py::none();
  if (const auto& cores = limits.cpu_cores)
    result["cpu_cores"] = py::make_tuple(cores->value, cores->file);
  result["memory_bytes"] = py::none();
  if (const auto& memory = limits.memory_bytes)
    result["memory_bytes"] = py::make_tuple(static_cast<std::int64_t>(memory->value), memory->file);
  return result;
}

// {("all_reduce", "ring"): {"num_calls": 3, "sent_bytes": 4096, ...}, ...}; what was never called
// is not there.
py::dict counts_of(const Stats& stats) {
  py::dict result;
  for (int op = 0; op < kNumOpKinds; ++op) {
    for (int algorithm = 0; algorithm < kNumAlgorithms; ++algorithm) {
      const auto op_kind = static_cast<OpKind>(op);
      const auto algorithm_kind = static_cast<Algorithm>(algorithm);
      const Stats::Counts counts = stats.counts(op_kind, algorithm_kind);
      if (counts.num_calls == 0) continue;
      py::dict entry;
      entry["num_calls"] = counts.num_calls;
      entry["sent_bytes"] = counts.sent_bytes;
      entry["copied_bytes"] = counts.copied_bytes;
      result[py::make_tuple(name_of(op_kind), name_of(algorithm_kind))] = entry;
    }
  }
  return result;
}

// The types of c10d must be known: ours are their children.
void bind_classes(py::module_& m) {
  py::module_::import("torch.distributed");
  const auto copy = [](const GroupOptions& options, const py::object&) {
    return c10::make_intrusive<GroupOptions>(options);
  };
  py::class_<GroupOptions, c10d::Backend::Options, c10::intrusive_ptr<GroupOptions>>(m,
                                                                                     "GroupOptions")
      .def("__deepcopy__", copy)
      .def_property_readonly("algorithm",
                             [](const GroupOptions& options) {
                               return std::string(name_of(options.engine.algorithm));
                             })
      .def_property_readonly(
          "is_rank_ordered",
          [](const GroupOptions& options) { return options.engine.is_rank_ordered; })
      .def_property_readonly("num_slots",
                             [](const GroupOptions& options) { return options.engine.num_slots; })
      .def_property_readonly("slot_bytes",
                             [](const GroupOptions& options) { return options.engine.slot_bytes; })
      .def_property_readonly(
          "one_shot_max_bytes",
          [](const GroupOptions& options) { return options.engine.one_shot_max_bytes; })
      .def_property_readonly("transport",
                             [](const GroupOptions& options) { return options.engine.transport; })
      .def_property_readonly("p2p_backend",
                             [](const GroupOptions& options) { return options.engine.p2p_backend; })
      .def_property_readonly("device_slot_bytes", [](const GroupOptions& options) {
        return options.engine.device_slot_bytes;
      });
  // Its destructor releases the GIL while it waits for threads.
  py::class_<ProcessGroupRingcomm, c10d::Backend, c10::intrusive_ptr<ProcessGroupRingcomm>>(
      m, "ProcessGroupRingcomm")
      .def_property_readonly("options", &ProcessGroupRingcomm::options)
      .def("get_error", &ProcessGroupRingcomm::getError)
      // torch calls this on ranks that are not part of a split group.
      .def("perform_nocolor_split", [](const ProcessGroupRingcomm&, const py::object&) {});
}

}  // namespace
}  // namespace ringcomm

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ringcomm;
  m.doc() = "ringcomm's engine; use it through the package ringcomm and torch.distributed.";
  // ringcomm/_extension.py reads it, and searches the file for it where it cannot be loaded.
  m.attr("BUILT_FOR") = "ringcomm is built for torch " TORCH_VERSION;
  bind_classes(m);
  bind_files(m);
  m.def("create_process_group", &create_process_group, py::arg("store"), py::arg("rank"),
        py::arg("size"), py::arg("timeout"), py::arg("algorithm"), py::arg("is_rank_ordered"),
        py::arg("num_slots"), py::arg("slot_bytes"), py::arg("one_shot_max_bytes"),
        py::arg("transport"), py::arg("p2p_backend"), py::arg("device_slot_bytes"),
        py::arg("group_name"), py::arg("global_ranks"), py::call_guard<py::gil_scoped_release>());
  m.def("stats", [] { return counts_of(Stats::process_wide()); });
  m.def("group_stats", [](const c10::intrusive_ptr<c10d::Backend>& backend) {
    return counts_of(communicator_of(backend)->stats());
  });
  m.def("transport_of", [](const c10::intrusive_ptr<c10d::Backend>& backend) {
    return communicator_of(backend)->transport();
  });
  m.def("device_transports", [](const c10::intrusive_ptr<c10d::Backend>& backend) {
    const py::gil_scoped_release
        released;  // objects that a group keeps may need the GIL in their destructors
    return process_group_of(backend).device_transports();
  });
  m.def("empty_shared_on",
        [](const c10::intrusive_ptr<c10d::Backend>& backend, const at::Device& device,
           const std::vector<int64_t>& sizes, at::ScalarType dtype) {
          const py::gil_scoped_release released;
          return process_group_of(backend).empty_shared_on(device, sizes, dtype);
        });
  m.def("mapped_bytes", [](const c10::intrusive_ptr<c10d::Backend>& backend) {
    return communicator_of(backend)->mapped_bytes();
  });
  m.def("start_trace", &trace::start, py::arg("events_fd"), py::arg("log_fd"),
        py::arg("num_events"));
  m.def("end_trace", &trace::end);
  m.def("empty_shared", &empty_shared, py::arg("sizes"), py::arg("dtype"));
  m.def("is_shared", &is_shared, py::arg("tensor"));
  m.def("shared_memory_usage", &shared_memory_usage);
  m.def("cgroup_limits", &cgroup_limits_of, py::arg("proc"), py::arg("cgroups"));
  m.def("say_last_words", &shm::Bootstrap::say_last_words, py::arg("text"));
  m.def("say_exit", &shm::Bootstrap::say_exit);
  m.def("simd_level", [] { return std::string(host::simd_level()); });
}
