#include "cuda/messages/transport.h"

#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <optional>
#include <ranges>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python_errors.h"
#include "collectives/call.h"
#include "core/arch.h"
#include "cuda/collectives/launch_plan.h"
#include "cuda/messages/backend_calls.h"
#include "host/group_state.h"
#include "host/process.h"
#include "host/threads.h"
#include "host/wait.h"

namespace ringcomm {
namespace {

// Reports of ranks on other hosts are in the store, which all ranks poll.
constexpr int kLooksPerQuestion = 4;

class MessageDeviceTransport final : public cuda::DeviceTransport {
 public:
  // `backend` as for BackendCalls. Collective over the group.
  MessageDeviceTransport(c10::intrusive_ptr<c10d::Backend> backend, Communicator& communicator,
                         const GroupOptions& options, c10::Device device)
      : communicator_(communicator),
        options_(options.engine),
        description_(backend != nullptr ? "messages over " + backend->getBackendName()
                                        : "none: a group of one"),
        calls_(std::move(backend), communicator.rank(), communicator.world_size(), device) {
    if (communicator.world_size() == 1) return;
    watch_.emplace(WatchThread::Pace{.interval = kCheckInterval, .num_looks = 0},
                   [this] { return look_at_peers(); });
    set_timeout(std::min(options.timeout, kLongestTimeout));
    watch(std::nullopt, false);  // what follows waits for all
    try {
      calls_.connect();
    } catch (...) {
      calls_.abort();
      throw;
    }
  }

  const std::string& description() const override { return description_; }

  void plan(Collective& call) const override { calls_.plan(options_, call); }

  void set_timeout(std::chrono::milliseconds timeout) override {
    const std::lock_guard lock(mutex_);
    timeout_ = timeout;
  }

  Traffic enqueue(const Collective& call, const cuda::StreamPlace& place) override {
    watch(call, place.capture != 0);
    return {.sent_bytes = calls_.run(call), .algorithm = call.algorithm};
  }

  void exchange(const std::vector<cuda::P2pMessage>& messages,
                const cuda::StreamPlace& place) override {
    watch(std::nullopt, place.capture != 0);
    calls_.exchange(messages);
  }

  bool map(const void*, std::size_t) override {
    C10_THROW_ERROR(
        NotImplementedError,
        "ringcomm: ranks that reach each other by " + description_ +
            " share no memory; use torch.empty instead: calls on it are sent as messages");
  }

  std::vector<Outcome> take_outcomes() override { return calls_.take_outcomes(); }

  // A rank reports that it fails before it aborts: its streams may still send incomplete data.
  bool may_have_given_up() const noexcept override {
    GroupState* const members = communicator_.group_state();
    return calls_.is_aborted() || (members != nullptr && members->is_aborted(/*asks=*/false));
  }

  void abort() noexcept override { calls_.abort(); }

 private:
  // Call it when messages start, of a collective or, without `header`, of a user.
  void watch(const std::optional<CallHeader>& header, bool is_captured) {
    if (!watch_) return;
    const std::lock_guard lock(mutex_);
    last_ = header;
    if (is_captured) watch_->stay_awake();  // they may start at any time
    watch_->look_for(timeout_ / kCheckInterval + 1);
  }

  // The watchdog: ends the group when a rank dies or fails while messages are in flight, because
  // the backend may wait for it without end. A rank that has left has ended its calls before.
  bool look_at_peers() {
    GroupState& members = *communicator_.group_state();
    std::ignore = members.is_aborted(/*asks=*/++num_looks_ % kLooksPerQuestion == 0);
    for (int peer = 0; peer < calls_.world_size(); ++peer) {
      if (peer == calls_.rank()) continue;
      const WaitStatus state = members.state_of(peer);
      if (state != WaitStatus::kPeerDied && state != WaitStatus::kAborted) continue;
      try {
        communicator_.failure().raise_stopped(state, peer, activity());
      } catch (const std::exception&) {
        // The error is kept for the next call or wait.
      }
      calls_.abort();
      return false;
    }
    return true;
  }

  Activity activity() {
    const std::lock_guard lock(mutex_);
    if (!last_) return {.op = "send", .description = "sends and receives", .timeout = timeout_};
    return {.op = name_of(last_->op),
            .seq = static_cast<std::int64_t>(last_->seq),
            .description = describe(*last_),
            .timeout = timeout_};
  }

  Communicator& communicator_;
  CommunicatorOptions options_;
  std::string description_;
  BackendCalls calls_;
  int num_looks_ = 0;  // the watchdog's
  std::mutex mutex_;
  // Guarded by mutex_.
  std::chrono::milliseconds timeout_{0};
  std::optional<CallHeader> last_;

  std::optional<WatchThread> watch_;  // not of a group of one; last: it uses all of the above
};

// Ends the group on all ranks if a rank cannot arrive.
LookForRanks look_for(Communicator& communicator, const GroupOptions& options, c10::Device device) {
  const WaitGuard its_guard(WaitLimits{.timeout = std::min(options.timeout, kLongestTimeout),
                                       .is_interrupted = is_interrupted});
  return [&communicator, &options, device,
          guard = its_guard](const std::vector<int>& missing) mutable {
    const Activity activity{.op = "init",
                            .description = "connecting tensors on " + device.str(),
                            .timeout = options.timeout};
    for (int rank = 0; rank < communicator.world_size(); ++rank)
      if (communicator.group_state()->has_died(rank))
        communicator.failure().raise_stopped(WaitStatus::kPeerDied, rank, activity);
    if (const WaitStatus status = guard.check(); status != WaitStatus::kNone)
      communicator.failure().raise_stopped(status, missing.front(), activity);
  };
}

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                               Communicator& communicator,
                                               const GroupOptions& options, c10::Device device) {
  namespace py = pybind11;
  const py::gil_scoped_acquire acquired;
  std::string name;
  try {
    name = py::module_::import("ringcomm.message_backend")
               .attr("for_device")(options.engine.message_backend,
                                   c10::DeviceTypeName(device.type(), /*lower_case=*/true))
               .cast<std::string>();
  } catch (const py::error_already_set& error) {
    TORCH_CHECK_VALUE(!error.matches(PyExc_ValueError), py::str(error.value()).cast<std::string>());
    throw;
  }
  return make_message_backend(name, store, communicator.group_state()->key(), communicator.rank(),
                              communicator.world_size(), options,
                              look_for(communicator, options, device),
                              "tensors on " + device.str());
}

// What a rank tells all others: the header of its call, then the elements that it has for each
// rank, then those that it expects from each.
using Record = std::vector<std::uint64_t>;
constexpr std::size_t kHeader = cuda::kHeaderWords;

Record record_of(const Collective& call, int rank, int world_size) {
  const bool has_own_sizes = has_private_sizes(call.op) || call.is_uneven;
  const cuda::HeaderWords words =
      cuda::to_words(has_own_sizes ? without_sizes(call) : CallHeader(call));
  Record record(words.begin(), words.end());
  const auto add = [&](const std::optional<CallPart>& part) {
    record.push_back(part ? part->num_elems : 0);
  };
  for (int to = 0; to < world_size; ++to) add(part_given(call, rank, to));
  for (int from = 0; from < world_size; ++from) add(part_taken(call, rank, from));
  return record;
}

// The records of all ranks as an all_gather moves them. It lives until that is over.
struct Exchange {
  Record mine;
  std::vector<Record> all;
  const void* input;
  std::vector<void*> outputs;

  Exchange(Record record, int world_size)
      : mine(std::move(record)),
        all(static_cast<std::size_t>(world_size), Record(mine.size())),
        input(mine.data()) {
    for (Record& one : all) outputs.push_back(one.data());
  }
};

// Ends the group where two ranks' records differ. Throws Error.
void compare(Communicator& communicator, const CallHeader& header, const Exchange& exchange) {
  const auto& [mine, all, input, outputs] = exchange;
  const auto rank = static_cast<std::size_t>(communicator.rank());
  const std::size_t num_ranks = all.size();
  const auto raise = [&](std::size_t peer, const std::string& difference) {
    communicator.failure().raise_mismatch(static_cast<int>(peer), difference,
                                          {.op = name_of(header.op),
                                           .seq = static_cast<std::int64_t>(header.seq),
                                           .description = describe(header)});
  };
  for (std::size_t peer = 0; peer < num_ranks; ++peer) {
    cuda::HeaderWords words;
    std::copy_n(all[peer].begin(), kHeader, words.begin());
    if (std::ranges::equal(words, mine | std::views::take(kHeader))) continue;
    CallHeader theirs = cuda::from_words(words.data());
    theirs.seq = header.seq;
    raise(peer, describe_difference(static_cast<int>(peer), theirs, name_of(header.op)));
  }
  const std::size_t elem_bytes = element_bytes(header.dtype);
  for (std::size_t from = 0; from < num_ranks; ++from)
    for (std::size_t to = 0; to < num_ranks; ++to) {
      const std::uint64_t given = all[from][kHeader + to];
      const std::uint64_t expected = all[to][kHeader + num_ranks + from];
      if (given != expected)
        raise(from == rank ? to : from,
              size_difference(static_cast<int>(from), given * elem_bytes, static_cast<int>(to),
                              expected * elem_bytes));
    }
}

}  // namespace

std::unique_ptr<cuda::DeviceTransport> make_message_device_transport(
    const c10::intrusive_ptr<c10d::Store>& store, Communicator& communicator,
    const GroupOptions& options, c10::Device device) {
  return std::make_unique<MessageDeviceTransport>(
      communicator.world_size() > 1 ? make_backend(store, communicator, options, device) : nullptr,
      communicator, options, device);
}

void check_header(Communicator& communicator, const Collective& call,
                  std::chrono::milliseconds timeout, std::function<void(bool)> done) {
  const int rank = communicator.rank(), world_size = communicator.world_size();
  const auto exchange = std::make_shared<Exchange>(record_of(call, rank, world_size), world_size);
  Collective all_gather{
      {.num_elems = exchange->mine.size() * sizeof exchange->mine[0], .op = OpKind::kAllGather},
      &exchange->input,
      exchange->outputs.data()};
  all_gather.is_counted = false;
  communicator.submit(all_gather, {.timeout = timeout, .is_interrupted = {}},
                      [&communicator, header = CallHeader(call), exchange,
                       done = std::move(done)](std::exception_ptr error) {
                        if (error == nullptr)
                          error = error_of([&] { compare(communicator, header, *exchange); });
                        done(error != nullptr);
                      });
}

}  // namespace ringcomm
