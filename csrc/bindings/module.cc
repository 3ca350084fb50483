#include <ATen/Parallel.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>
#include <unistd.h>

#include <thread>

#include "bindings/process_group.h"
#include "bindings/python_errors.h"
#include "collectives/call.h"
#include "collectives/trace.h"
#include "host/bootstrap.h"
#include "host/group.h"
#include "host/group_state.h"
#include "host/process.h"
#include "host/shared_arena.h"
#include "host/survivors.h"
#include "host/thread_pool.h"
#include "host/wait.h"
#include "kernels/common/tables.h"

namespace py = pybind11;
using namespace py::literals;

namespace ringcomm {
namespace {

// torch's threads. at::parallel_for has threads only where it is compiled with -fopenmp.
constexpr host::ThreadTeam kTorchThreads = {
    at::get_num_threads, [](std::size_t num_parts, const std::function<void(std::size_t)>& run) {
      const auto run_all = [&] {
        at::parallel_for(0, static_cast<std::int64_t>(num_parts), 1,
                         [&](std::int64_t begin, std::int64_t end) {
                           for (std::int64_t i = begin; i < end; ++i)
                             run(static_cast<std::size_t>(i));
                         });
      };
      host::may_use_team() ? run_all()
                           : std::thread(run_all).join();  // which has a team of its own
    }};

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

BackendPtr create_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                c10::intrusive_ptr<GroupOptions> options) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, "ringcomm: rank ", rank, " is not in a group of ",
                    size, " ranks; ranks are 0 to ", size - 1);
  return c10::make_intrusive<ProcessGroupRingcomm>(store, rank, size, std::move(options));
}

ProcessGroupRingcomm& process_group_of(const BackendPtr& backend) {
  auto* group = dynamic_cast<ProcessGroupRingcomm*>(backend.get());
  TORCH_CHECK_VALUE(group != nullptr, "ringcomm: this group's backend is ",
                    backend->getBackendName(), ", not ringcomm");
  return *group;
}

std::shared_ptr<Communicator> engine_of(const BackendPtr& backend) {
  return process_group_of(backend).communicator();
}

// What this rank knows of a group, without communication.
py::dict health_of(const BackendPtr& backend) {
  const std::shared_ptr<Communicator> engine = engine_of(backend);
  GroupState* const state = engine->group_state();
  std::vector<std::string> ranks;
  for (int rank = 0; rank < engine->world_size(); ++rank) {
    const bool is_peer = state != nullptr && rank != engine->rank();
    ranks.emplace_back(is_peer && state->has_left(rank)                  ? "left"
                       : is_peer && state->has_died(rank)                ? "dead"
                       : is_peer && state->process_of(rank).is_stopped() ? "stopped"
                                                                         : "alive");
  }
  std::optional<std::string> failure;
  try {
    engine->failure().rethrow_if_any();
    if (state != nullptr && state->is_aborted(/*asks=*/false) &&
        state->state_of(engine->rank()) == WaitStatus::kAborted)
      failure = state->abort_reason().text;
  } catch (const Error& error) {
    failure = error.what();
  }
  return py::dict("ranks"_a = ranks, "failure"_a = failure);
}

// Ends all waits in the group.
std::shared_ptr<host::Survivors> begin_shrink(const BackendPtr& backend,
                                              std::chrono::milliseconds timeout) {
  std::shared_ptr<Communicator> engine = engine_of(backend);
  auto* const group = dynamic_cast<host::Group*>(engine->group_state());
  TORCH_CHECK_NOT_IMPLEMENTED(
      group != nullptr,
      "ringcomm: shrink needs a group whose ranks all share memory, and this one's transport is ",
      engine->transport_description(),
      ": restart the job from its last checkpoint by torchrun --max-restarts N");
  std::shared_ptr<host::Survivors> made;
  with_python_errors([&] {
    engine->failure().check_not_inherited();
    const WaitLimits limits{.timeout = std::min(timeout, kLongestTimeout),
                            .is_interrupted = is_interrupted};
    made = {new host::Survivors(*group, limits), [engine](auto* survivors) { delete survivors; }};
  });
  // The others' waits end, also where nothing has failed yet.
  if (!engine->failure().has_failed())
    engine->abort("rank " + std::to_string(engine->rank()) + " called ringcomm.shrink");
  return made;
}

template <class Result, class... Args>
auto checked(Result (host::Survivors::*call)(Args...)) {
  return [call](host::Survivors& survivors, Args... args) {
    Result result{};
    with_python_errors([&] { result = (survivors.*call)(args...); });
    return result;
  };
}

void bind_survivors(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> without_gil;
  using host::Survivors;
  py::class_<Survivors, std::shared_ptr<Survivors>>(m, "Survivors")
      .def("agree", checked(&Survivors::agree), without_gil)
      .def("take_store", checked(&Survivors::take_store), without_gil)
      .def("confirm", checked(&Survivors::confirm), "has_made"_a, without_gil)
      .def("is_over", &Survivors::is_over)
      .def_property_readonly("attempt", &Survivors::attempt);
  m.def("begin_shrink", &begin_shrink, "backend"_a, "timeout"_a, without_gil);
  m.def("health", &health_of, "backend"_a);
}

py::dict shared_memory_usage() {
  const host::SharedArena* arena = host::SharedArena::find();
  const auto usage = arena != nullptr ? arena->usage() : host::SharedArena::Usage{};
  return py::dict("num_blocks"_a = usage.num_blocks, "num_regions"_a = usage.num_regions);
}

// {"cpu_cores": (2.0, "/sys/fs/cgroup/cpu.max"), "memory_bytes": None}
py::dict cgroup_limits_of(const std::string& proc, const std::string& cgroups) {
  const CgroupLimits limits = read_cgroup_limits(proc, cgroups);
  py::dict result("cpu_cores"_a = py::none(), "memory_bytes"_a = py::none());
  if (const auto& cores = limits.cpu_cores)
    result["cpu_cores"] = py::make_tuple(cores->value, cores->file);
  if (const auto& memory = limits.memory_bytes)
    result["memory_bytes"] = py::make_tuple(static_cast<std::int64_t>(memory->value), memory->file);
  return result;
}

// {("all_reduce", "ring"): {"num_calls": 3, "sent_bytes": 4096, ...}, ...}; what was never called
// is not there.
py::dict counts_of(const Stats& stats) {
  py::dict result;
  for (int i = 0; i < kNumOpKinds * kNumAlgorithms; ++i) {
    const auto op = static_cast<OpKind>(i / kNumAlgorithms);
    const auto algorithm = static_cast<Algorithm>(i % kNumAlgorithms);
    const Stats::Counts counts = stats.counts(op, algorithm);
    if (counts.num_calls == 0) continue;
    result[py::make_tuple(name_of(op), name_of(algorithm))] =
        py::dict("num_calls"_a = counts.num_calls, "sent_bytes"_a = counts.sent_bytes,
                 "copied_bytes"_a = counts.copied_bytes, "num_in_place"_a = counts.num_in_place,
                 "num_staged"_a = counts.num_staged);
  }
  return result;
}

// What this rank has counted of each rank of the group; empty where nothing is recorded.
py::list counts_by_peer(const Communicator& engine) {
  py::list result;
  if (engine.log() == nullptr) return result;
  for (const recorder::PeerCounts& counts : engine.log()->counts())
    result.append(py::dict("num_waits"_a = counts.num_waits,
                           "waited_s"_a = static_cast<double>(counts.waited_ns) / 1e9,
                           "num_late"_a = counts.num_late, "sent_bytes"_a = counts.sent_bytes,
                           "received_bytes"_a = counts.received_bytes));
  return result;
}

// The types of c10d must be known: ours are their children.
void bind_classes(py::module_& m) {
  py::module_::import("torch.distributed");
  py::class_<GroupOptions, c10d::Backend::Options, c10::intrusive_ptr<GroupOptions>> options(
      m, "GroupOptions");
  options.def(py::init([](const std::string& algorithm, bool is_rank_ordered,
                          std::size_t one_shot_max_bytes, const std::string& transport,
                          const std::string& message_backend, int max_threads, bool log_waits) {
                const CommunicatorOptions engine{.algorithm = algorithm_from_name(algorithm),
                                                 .is_rank_ordered = is_rank_ordered,
                                                 .one_shot_max_bytes = one_shot_max_bytes,
                                                 .transport = transport,
                                                 .message_backend = message_backend,
                                                 .max_threads = max_threads,
                                                 .log_waits = log_waits};
                return c10::make_intrusive<GroupOptions>(engine, kBackendDefaultTimeout);
              }),
              py::kw_only(), "algorithm"_a, "is_rank_ordered"_a, "one_shot_max_bytes"_a,
              "transport"_a, "message_backend"_a, "max_threads"_a, "log_waits"_a);
  options.def("__deepcopy__", [](const GroupOptions& given, const py::object&) {
    return c10::make_intrusive<GroupOptions>(given);
  });
  options.def_property_readonly("text",
                                [](const GroupOptions& given) { return given.engine.to_text(); });
  // Its destructor releases the GIL while it waits for threads.
  py::class_<ProcessGroupRingcomm, c10d::Backend, c10::intrusive_ptr<ProcessGroupRingcomm>>(
      m, "ProcessGroupRingcomm")
      .def_property_readonly("options", &ProcessGroupRingcomm::options)
      .def("get_error", &ProcessGroupRingcomm::getError)
      .def("register_peers", &ProcessGroupRingcomm::register_peers, "store"_a, "ranks"_a,
           "global_ranks"_a, "is_abandoned"_a, py::call_guard<py::gil_scoped_release>())
      // torch calls this on ranks that are not part of a split group.
      .def("perform_nocolor_split", [](const ProcessGroupRingcomm&, const py::object&) {});
}

}  // namespace

void define_eager_ops(py::module_& m);  // collective_ops.cc

}  // namespace ringcomm

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ringcomm;
  m.doc() = "ringcomm's engine; use it through the package ringcomm and torch.distributed.";
  // ringcomm/_extension.py reads it, and searches the file for it where it cannot be loaded.
  m.attr("BUILT_FOR") = "ringcomm is built for torch " TORCH_VERSION;
  const auto torch_loaded_in = py::module_::import("_ringcomm.autoload").attr("PID").cast<pid_t>();
  host::set_thread_team(kTorchThreads, torch_loaded_in != ::getpid());
  bind_classes(m);
  bind_survivors(m);
  auto eager = m.def_submodule("eager");
  define_eager_ops(eager);
  const py::call_guard<py::gil_scoped_release> without_gil;
  m.def("create_process_group", &create_process_group, "store"_a, "rank"_a, "size"_a, "options"_a,
        without_gil);
  m.def("own_connection", &own_connection, "store"_a, without_gil);
  m.def("report_failure", &ProcessGroupRingcomm::report_failure, "store"_a, "rank"_a, "size"_a,
        "global_ranks"_a, "text"_a, without_gil);
  m.def("stats", [] { return counts_of(Stats::process_wide()); });
  m.def("group_stats",
        [](const BackendPtr& backend) { return counts_of(engine_of(backend)->stats()); });
  m.def("peer_counts", [](const BackendPtr& backend) {
    const std::shared_ptr<Communicator> engine = engine_of(backend);
    return counts_by_peer(*engine);
  });
  m.def("transport_of",
        [](const BackendPtr& backend) { return engine_of(backend)->transport_description(); });
  m.def("mapped_bytes",
        [](const BackendPtr& backend) { return engine_of(backend)->mapped_bytes(); });
  m.def(
      "ranks_per_device",
      [](const BackendPtr& backend, const at::Device& device) {
        return process_group_of(backend).ranks_per_device(device);
      },
      without_gil);
  m.def("most_ranks_per_core", &host::CoreShare::most_ranks_per_core);
  m.def(
      "empty_shared_on",
      [](const BackendPtr& backend, const at::Device& device, const std::vector<int64_t>& sizes,
         at::ScalarType dtype) {
        return process_group_of(backend).empty_shared_on(device, sizes, dtype);
      },
      without_gil);
  m.def("recorder_names", [] {
    py::dict names;
    const auto set = [&]<class Kind>(const char* key, Kind, int num) {
      py::list list;
      for (int i = 0; i < num; ++i) list.append(name_of(static_cast<Kind>(i)));
      names[key] = list;
    };
    set("op", OpKind{}, kNumOpKinds);
    set("dtype", DType{}, kNumDTypes);
    set("reduction", Reduction{}, kNumReductions);
    set("algorithm", Algorithm{}, kNumAlgorithms);
    names["title"] = call_titles();
    return names;
  });
  m.def("recorder_clock", [] {
    const Anchor now = Anchor::now();
    return std::tuple(now.ticks, now.ns);
  });
  m.def("set_doctor", &recorder::set_doctor, "command"_a);
  m.def("start_trace", &recorder::start_trace, "events_fd"_a, "log_fd"_a, "num_events"_a);
  m.def("empty_shared", &empty_shared, "sizes"_a, "dtype"_a);
  m.def("is_shared", &is_shared, "tensor"_a);
  m.def("shared_memory_usage", &shared_memory_usage);
  m.def("cgroup_limits", &cgroup_limits_of, "proc"_a, "cgroups"_a);
  m.def("report_exit", &host::Bootstrap::report_exit, "reason"_a = "");
  m.def("end_continuations", &end_continuations, py::call_guard<py::gil_scoped_release>());
  m.def("simd_level", [] { return std::string(cpu::simd_level()); });
}
