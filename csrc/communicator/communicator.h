#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/call.h"
#include "collectives/failure.h"
#include "collectives/send_recv.h"
#include "collectives/trace.h"
#include "communicator/ordered_queue.h"
#include "host/group_state.h"
#include "host/timed_store.h"
#include "host/wait.h"
#include "transport/transport.h"

namespace ringcomm {

/// What is known of the ranks of a group before they have met; as in host::GroupTerms.
struct KnownRanks {
  PeerProcesses processes = {};
  std::vector<std::uint64_t> global_ranks = {};
};

/// One rank's side of a group. Runs its collectives in the order of the calls, and its sends and
/// receives concurrently. All functions may be called from any thread.
///
/// After a failed collective the ranks are out of step, so it ends the group: the first cause is
/// kept, reported to all ranks, and thrown by every later call. Wrong arguments
/// (std::invalid_argument) are detected before anything is exchanged and do not end the group.
class Communicator {
 public:
  using Done = std::function<void(std::exception_ptr)>;

  /// Collective over the group. Throws Error.
  Communicator(KeyValueStore& store, int rank, int world_size, const CommunicatorOptions& options,
               std::chrono::milliseconds timeout, const MakeMessenger& make_messenger = {},
               const KnownRanks& known = {});
  /// Calls close() without a way to interrupt it, then leaves the group.
  ~Communicator();

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const CommunicatorOptions& options() const { return options_; }
  Stats& stats() { return stats_; }
  /// The number of the collective that will be called next, though others may be queued before it.
  /// Those of issue(), on devices, are counted apart, because a captured one may be replayed on one
  /// rank where another rank makes the call.
  std::uint64_t next_seq(bool is_on_device = false) const {
    return is_on_device ? num_on_devices_.load(std::memory_order_relaxed) : queue_.next_number();
  }
  /// The algorithm that a call gets.
  Algorithm algorithm_of(Collective call) const;
  /// A readable description of the transport and the reason for its choice.
  const std::string& transport_description() const { return transport_description_; }
  /// Adds the group to the flight recorder, and to a trace if there is one, with its name and
  /// its ranks' numbers in the job. Call it before all collectives.
  void record_as(const std::string& name, const std::vector<std::uint64_t>& ranks);
  /// This rank's side there; null in a group of one, and without a recorder.
  const recorder::Log* log() const { return log_.get(); }
  /// The group's number in the recorder, and in a trace.
  std::uint32_t recorded_as() const { return group_; }
  /// Bytes of shared memory mapped for the group, touched or not.
  std::size_t mapped_bytes() const {
    return transport_ != nullptr ? transport_->mapped_bytes() : 0;
  }

  /// Runs a collective to its end, in this thread when no other is before it, and returns its
  /// number; that of the last part, of an update that a transport makes in parts. Throws Error,
  /// std::invalid_argument.
  std::uint64_t run(Collective&& call, const WaitLimits& limits);
  /// Starts it. The call's arrays and buffers must live until `done` has been called, which happens
  /// once, on any thread, with the error or null. Throws std::invalid_argument, and what ended the
  /// group.
  OrderedQueue::Request submit(const Collective& call, const WaitLimits& limits, Done done);
  OrderedQueue& queue() { return queue_; }

  /// For collectives that do not go through the queue, but are enqueued to a device in the order of
  /// their calls: checks one and gives it a number. Throws as submit() does.
  void issue(Collective& call);
  /// Adds one, or a message, to the flight recorder.
  recorder::Call record_on_device(recorder::Event event) {
    event.group = group_;
    event.kind = recorder::Kind::kEnqueued;
    return log_ != nullptr ? log_->begin(event) : recorder::Call{};
  }

  /// Sends and receives; null in a group of one.
  SendRecv* send_recv() { return send_recv_.get(); }

  /// Call it before the destructor, after the last call. Returns when the submitted collectives and
  /// sends are complete, and ends the receives with an error. `is_interrupted` is called about
  /// every 50 ms, true ends the group; may be empty. A second call does nothing.
  void close(const std::function<bool()>& is_interrupted);

  /// Ends the group: calls that wait, here and on the other ranks, throw kAborted naming this rank.
  void abort(const std::string& why) { failure_->abort(why); }
  /// Whether this thread is inside a call of the group, below a signal handler.
  bool is_in_call() const {
    return queue_.is_inside() || (send_recv_ != nullptr && send_recv_->is_inside());
  }
  void abort_if(const std::function<bool()>& is_interrupted) {
    if (is_interrupted && is_interrupted()) abort("interrupted by a signal");
  }
  Failure& failure() { return *failure_; }
  /// Null in a group of one.
  GroupState* group_state() { return transport_ != nullptr ? &transport_->group_state() : nullptr; }

  /// Returns memory that no call has used since the last time. Called every ten seconds.
  void return_idle_pages();

 private:
  void validate(const Collective& call) const;
  void plan(Collective& call) const;
  void execute(Collective& call, const WaitLimits& limits, std::uint64_t number);
  [[noreturn]] void end_with(const std::string& where, const std::exception& error);

  int rank_;
  int world_size_;
  CommunicatorOptions options_;
  Stats stats_;
  std::string transport_description_ = "none: a group of one";
  std::uint32_t group_ = 0;
  std::unique_ptr<Transport> transport_;  // null in a group of one, as is send_recv_
  std::unique_ptr<recorder::Log> log_;    // null without a recorder
  std::unique_ptr<Failure> failure_;
  std::unique_ptr<SendRecv> send_recv_;
  std::atomic<std::uint64_t> num_on_devices_ = 0;
  OrderedQueue queue_;  // last, so first to go: it runs what is left
};

}  // namespace ringcomm
