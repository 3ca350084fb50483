#include "bindings/process_group.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "bindings/python_errors.h"
#include "core/errors.h"
#include "host/group_state.h"
#include "host/process.h"
#include "host/rendezvous.h"
#include "host/timed_store.h"
#include "host/wait.h"

namespace ringcomm {
namespace {

const c10d::Store* base_of(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  return prefixed != nullptr ? prefixed->getUnderlyingNonPrefixStore().get() : store.get();
}

// torch's store (TCPStore, FileStore, HashStore, prefixed) as the rendezvous knows stores.
class StoreAdapter final : public KeyValueStore {
 public:
  /// `is_abandoned`: whether nobody needs the group any more; may be empty. With `is_shared` the
  /// first call clones the store, which may wait for its server.
  StoreAdapter(c10::intrusive_ptr<c10d::Store> store, std::function<bool()> is_abandoned,
               bool is_shared = false)
      : store_(std::move(store)), is_abandoned_(std::move(is_abandoned)), is_shared_(is_shared) {}

  void set(const std::string& key, const std::string& value) override { own().set(key, value); }
  bool is_interrupted() override {
    return ringcomm::is_interrupted() || (is_abandoned_ && is_abandoned_());
  }
  std::optional<std::string> try_get(const std::string& key) override {
    if (!own().check({key})) return {};
    return own().get_to_str(key);
  }
  void set_first(const std::string& key, const std::string& value) override {
    try {
      own().compareSet(key, "", value);
    } catch (const std::exception&) {  // a store, also of Python's, that has no such operation
      own().set(key, value);
    }
  }
  std::unique_ptr<KeyValueStore> clone() override {
    return std::make_unique<StoreAdapter>(store_, is_abandoned_, /*is_shared=*/true);
  }

 private:
  c10d::Store& own() {
    if (is_shared_) store_ = own_connection(store_);
    is_shared_ = false;
    return *store_;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::function<bool()> is_abandoned_;
  bool is_shared_;
};

constexpr const char* kDestroyed =
    "ringcomm: this process group has been destroyed; make a new one with init_process_group or "
    "new_group";
constexpr const char* kNoDevices =
    "ringcomm: this build has no CUDA support; rebuild with it: "
    "RINGCOMM_CUDA=1 pip install --no-build-isolation --force-reinstall --no-deps .";
// How long calls of other threads have to leave a group that is destroyed.
constexpr std::chrono::seconds kLeavePatience{10};

// The processes that are known to a group, by global rank, while it lives.
struct KnownPeers {
  std::weak_ptr<Communicator> group;
  PeerProcesses processes;
  std::function<bool()> is_abandoned = {};  // of a predecessor, which had another store
};
// The groups that have all ranks, by the store that they were made over: they know the processes of
// every later group over that store.
struct PeerRegistry {
  std::mutex mutex;
  std::map<const c10d::Store*, KnownPeers> by_store;
};
constinit PerProcess<PeerRegistry> peer_registry;

KnownPeers peers_known_over(const c10::intrusive_ptr<c10d::Store>& store) {
  PeerRegistry& all = peer_registry.get();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_store.find(base_of(store));
  return found != all.by_store.end() ? found->second : KnownPeers{};
}

// What the group of all ranks knows, by rank of the group that has these global ranks.
PeerProcesses processes_of(const KnownPeers& peers, const std::vector<uint64_t>& global_ranks) {
  PeerProcesses known;
  for (const uint64_t rank : global_ranks)
    known.push_back(rank < peers.processes.size() ? peers.processes[rank] : nullptr);
  return peers.group.expired() ? PeerProcesses{} : known;
}

void register_group(const c10::intrusive_ptr<c10d::Store>& store,
                    const std::vector<uint64_t>& global_ranks,
                    const std::shared_ptr<Communicator>& communicator) {
  for (std::size_t rank = 0; rank < global_ranks.size(); ++rank)
    if (global_ranks[rank] != rank) return;
  PeerRegistry& all = peer_registry.get();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.by_store, [](const auto& item) { return item.second.group.expired(); });
  // A group of the first ranks only knows fewer than one of all.
  KnownPeers& known = all.by_store[base_of(store)];
  const GroupState* const state = communicator->group_state();
  if (state != nullptr &&
      (known.is_abandoned || known.processes.size() < state->processes().size()))
    known = {.group = communicator, .processes = state->processes()};
}

}  // namespace

c10::intrusive_ptr<c10d::Store> own_connection(const c10::intrusive_ptr<c10d::Store>& store) {
  const c10d::Store* base = base_of(store);
  const bool has_connection = dynamic_cast<const c10d::TCPStore*>(base) != nullptr ||
                              dynamic_cast<const c10d::FileStore*>(base) != nullptr;
  return has_connection ? store->clone() : store;
}

constinit MakeDevices make_devices = nullptr;

ProcessGroupRingcomm::ProcessGroupRingcomm(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                           int size, c10::intrusive_ptr<GroupOptions> options)
    : Backend(rank, size),
      options_(std::move(options)),
      last_split_(c10::intrusive_ptr<c10d::Backend>()) {
  const KnownPeers peers = peers_known_over(store);
  const auto timeout = std::min(options_->timeout, kLongestTimeout);
  const MakeMessenger make_messenger = [&](const std::string& key, const LookForRanks& look) {
    return messages_over(make_message_backend(options_->engine.message_backend, store, key, rank,
                                              size, *options_, look, "the group's messages"));
  };
  with_python_errors([&] {
    TimedStore timed(std::make_shared<StoreAdapter>(store, peers.is_abandoned),
                     deadline_after(timeout));
    communicator_ = std::make_shared<Communicator>(
        timed, rank, size, options_->engine, timeout,
        options_->engine.message_backend.empty() ? MakeMessenger{} : make_messenger,
        KnownRanks{processes_of(peers, options_->global_ranks_in_group),
                   options_->global_ranks_in_group});
  });
  try {
    communicator_->record_as(options_->group_name, options_->global_ranks_in_group);
    register_group(store, options_->global_ranks_in_group, communicator_);
    if (make_devices != nullptr)
      devices_ = make_devices(store, options_, communicator_, rank, size);
  } catch (const std::exception& error) {
    communicator_->abort(error.what());  // the others have the group already
    throw;
  }
}

void ProcessGroupRingcomm::report_failure(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                          int size, const std::vector<uint64_t>& global_ranks,
                                          const std::string& text) {
  StoreAdapter adapter(store, {});
  host::Rendezvous(adapter, {.rank = rank, .world_size = size, .global_ranks = global_ranks},
                   std::chrono::milliseconds(0))
      .report_failure(Error({.kind = ErrorKind::kSystem, .rank = rank}, text));
}

ProcessGroupRingcomm::~ProcessGroupRingcomm() {
  try {
    leave(/*is_asked=*/false);
  } catch (const python_error&) {
    // A destructor cannot raise what a signal handler did: Python raises it at its next
    // instruction.
    PyErr_SetInterrupt();
  }
}

std::shared_ptr<Communicator> ProcessGroupRingcomm::communicator() const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(communicator_ != nullptr, kDestroyed);
  return communicator_;
}

void ProcessGroupRingcomm::register_peers(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const std::vector<uint64_t>& global_ranks,
                                          std::function<bool()> is_abandoned) {
  const std::shared_ptr<Communicator> engine = communicator();
  KnownPeers known{.group = engine, .processes = {}, .is_abandoned = std::move(is_abandoned)};
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (known.processes.size() <= global_ranks[i]) known.processes.resize(global_ranks[i] + 1);
    known.processes[global_ranks[i]] =
        engine->group_state()->processes()[static_cast<std::size_t>(ranks[i])];
  }
  PeerRegistry& all = peer_registry.get();
  const std::lock_guard lock(all.mutex);
  all.by_store[base_of(store)] = std::move(known);
}

std::shared_ptr<Devices> ProcessGroupRingcomm::devices() const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(communicator_ != nullptr, kDestroyed);
  TORCH_CHECK_VALUE(devices_ != nullptr, kNoDevices);
  return devices_;
}

void ProcessGroupRingcomm::abort() { abort("the process group was aborted"); }

void ProcessGroupRingcomm::abort(const std::string& why) {
  const auto [communicator, devices] = [this] {
    const std::lock_guard lock(mutex_);
    return std::pair(communicator_, devices_);
  }();
  if (communicator != nullptr) communicator->abort(why);
  if (devices != nullptr) devices->abort();
}

bool ProcessGroupRingcomm::is_in_call() {
  const std::lock_guard lock(mutex_);
  return communicator_ != nullptr && communicator_->is_in_call();
}

bool ProcessGroupRingcomm::is_destroyed_or_failed() {
  const std::lock_guard lock(mutex_);
  return communicator_ == nullptr || communicator_->failure().has_failed();
}

void ProcessGroupRingcomm::leave(bool is_asked) {
  if (is_in_call()) {
    // A signal handler: the call below it ends, and uses the communicator until then. The rest is
    // done when nothing refers to the group; if that is now, the call's reference is the last.
    if (is_asked) with_python_errors([&] { report_handled_exception(); });
    abort("the group was destroyed in a signal handler");
    if (is_asked) return;
    const std::lock_guard lock(mutex_);
    communicator_.reset();
    new std::shared_ptr(std::move(devices_));  // its end may wait for the call
    return;
  }
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Devices> devices;
  {
    const std::lock_guard lock(mutex_);
    communicator.swap(communicator_);
    devices.swap(devices_);
  }
  if (communicator == nullptr) return;
  if (communicator->failure().is_inherited()) {
    // In a forked child the group is the parent's; what must not be destroyed is leaked.
    new std::shared_ptr(std::move(communicator));
    new std::shared_ptr(std::move(devices));
    return;
  }
  const auto end = [&] {
    if (devices != nullptr) devices->drain();
    communicator->close(is_interrupted);
    // Calls of other threads, which have nothing to wait for any more, use the communicator too.
    const auto deadline = std::chrono::steady_clock::now() + kLeavePatience;
    while (devices.use_count() > 1 && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    devices.reset();
    communicator.reset();
  };
  with_python_errors([&] {
    if (is_asked) report_handled_exception();
    without_gil(end);
  });
}

int ProcessGroupRingcomm::ranks_per_device(at::Device device) {
  int found = 0;
  with_python_errors([&] { found = devices()->connect(device); });
  return found;
}

void ProcessGroupRingcomm::eagerConnectSingleDevice(at::Device device) {
  if (device.is_cpu()) return;
  const c10::DeviceGuard guard(device);
  try {
    ranks_per_device(device);
  } catch (const c10::ValueError&) {
    // No transport supports such tensors; a call with one raises.
  }
}

std::chrono::milliseconds ProcessGroupRingcomm::effective(std::chrono::milliseconds timeout) const {
  return std::min(timeout <= kNoTimeout ? options_->timeout : timeout, kLongestTimeout);
}

WaitLimits ProcessGroupRingcomm::limits_of(std::chrono::milliseconds timeout) const {
  return {.timeout = effective(timeout), .is_interrupted = is_interrupted};
}

c10d::ErrorType ProcessGroupRingcomm::getError() {
  const std::shared_ptr<Communicator> engine = communicator();
  try {
    if (const auto cause = engine->failure().first_cause()) std::rethrow_exception(cause);
    return c10d::ErrorType::SUCCESS;
  } catch (const Error& error) {
    if (error.info().kind == ErrorKind::kTimeout) return c10d::ErrorType::TIMEOUT;
    if (error.info().kind == ErrorKind::kPeerDied) return c10d::ErrorType::REMOTE_ERROR;
  } catch (...) {
  }
  return c10d::ErrorType::COMM_ERROR;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupRingcomm::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& opts) {
  const auto own = std::find(ranks.begin(), ranks.end(), getRank());
  if (own == ranks.end()) return nullptr;
  const auto last = [this] {
    const std::lock_guard lock(mutex_);
    return last_split_.lock();
  }();
  // torch names a group of the same ranks the same again once an earlier one has been destroyed.
  if (last != nullptr && last->getBackendOptions()->group_name == opts->group_name &&
      !static_cast<ProcessGroupRingcomm&>(*last).is_destroyed_or_failed())
    return last;
  // A copy: c10d hands the same options to every split.
  const auto* given = dynamic_cast<const GroupOptions*>(opts.get());
  auto options = c10::make_intrusive<GroupOptions>(given != nullptr ? *given : *options_);
  // The variable holds for all groups, so it has set this one's.
  if (std::getenv("RINGCOMM_TIMEOUT") == nullptr) options->timeout = opts->timeout;
  options->group_name = opts->group_name;
  options->global_ranks_in_group.clear();
  for (const int rank : ranks)
    if (const auto idx = static_cast<std::size_t>(rank);
        idx < options_->global_ranks_in_group.size())
      options->global_ranks_in_group.push_back(options_->global_ranks_in_group[idx]);
  auto group = c10::make_intrusive<ProcessGroupRingcomm>(
      store, static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size()), options);
  const std::lock_guard lock(mutex_);
  last_split_ = c10::weak_intrusive_ptr<c10d::Backend>(group);
  return group;
}

int ProcessGroupRingcomm::checked_rank(int64_t rank, const char* what) const {
  TORCH_CHECK_VALUE(rank >= 0 && rank < getSize(), "ringcomm: ", what, " is ", rank,
                    ", not a rank of a group of ", getSize());
  return static_cast<int>(rank);
}

}  // namespace ringcomm
