#include "communicator/communicator.h"

#include <cstring>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "collectives/call.h"
#include "collectives/fused_update.h"
#include "host/rank_record.h"
#include "host/rendezvous.h"
#include "transport/shm/context.h"
#include "transport/transport.h"

namespace ringcomm {
namespace {

// Chooses the transport of a group of at least 2 ranks, and says in words which and why;
// collective.
std::pair<std::unique_ptr<Transport>, std::string> make_transport(
    KeyValueStore& store, int rank, int world_size, const CommunicatorOptions& options,
    const MakeMessenger& make_messenger, const KnownRanks& known,
    std::chrono::milliseconds timeout) {
  const bool is_messages_only = options.transport == "messages";
  host::Rendezvous rendezvous(store,
                              {.rank = rank,
                               .world_size = world_size,
                               .options = options.to_text(),
                               .host_id = options.host_id,
                               .global_ranks = known.global_ranks,
                               .known = known.processes,
                               .shares_memory = !is_messages_only,
                               .is_one_host = options.transport == "shm",
                               .log_waits = options.log_waits},
                              timeout);
  try {
    const PeerTable peer_table = rendezvous.find_ranks();
    const std::string hosts = peer_table.describe();
    if (peer_table.num_hosts() == 1 && !is_messages_only) {
      auto transport = std::make_unique<ShmTransport>(rendezvous, peer_table, rank, options);
      rendezvous.withdraw_record();
      return {std::move(transport), "shm: " + hosts};
    }
    if (!make_messenger)
      throw std::invalid_argument((is_messages_only ? "the transport is messages" : hosts) +
                                  ", but no backend for messages is available");
    const bool is_flat = is_messages_only || peer_table.num_hosts() == world_size;
    auto transport =
        make_message_transport(store, rendezvous, peer_table, options, make_messenger, is_flat);
    rendezvous.withdraw_record();
    return {std::move(transport),
            (is_flat ? "messages over " : "shm inside a host, messages over ") +
                options.message_backend +
                (is_messages_only ? ", as requested; "
                 : is_flat        ? ", because no two ranks share a host; "
                                  : " between them; ") +
                hosts};
  } catch (const std::invalid_argument&) {
    throw;  // on all ranks
  } catch (const std::exception& error) {
    rendezvous.report_failure(error);
    throw;
  }
}

// In a group of one every output is its input, or that updated.
void run_in_group_of_one(const Collective& call) {
  if (call.op == OpKind::kReduceUpdateGather) {
    const void* grad = call.inputs[0];
    OwnerUpdate(call, 0, 1).run(&grad, 1, {0, call.num_elems}, nullptr);
    return;
  }
  if (call.op == OpKind::kBarrier) return;
  const std::size_t num_bytes = call.input_shard(0) * element_bytes(call.dtype);
  if (num_bytes == 0 || call.inputs[0] == call.outputs[0]) return;
  std::memcpy(call.outputs[0], call.inputs[0], num_bytes);
}

}  // namespace

Communicator::Communicator(KeyValueStore& store, int rank, int world_size,
                           const CommunicatorOptions& options, std::chrono::milliseconds timeout,
                           const MakeMessenger& make_messenger, const KnownRanks& known)
    : rank_(rank), world_size_(world_size), options_(options) {
  if (!options.transport.empty() && options.transport != "shm" && options.transport != "messages")
    throw std::invalid_argument("transport must be shm or messages, got '" + options.transport +
                                "'");
  if (world_size > 1) {
    recorder::start();  // before a peer asks for it
    std::tie(transport_, transport_description_) =
        make_transport(store, rank, world_size, options, make_messenger, known, timeout);
    if (!transport_->shares_memory()) queue_.leave_to_thread();
  }
  failure_ = std::make_unique<Failure>(transport_ != nullptr ? &transport_->group_state() : nullptr,
                                       rank, world_size);
  if (transport_ != nullptr) send_recv_ = transport_->make_send_recv(*failure_, stats_);
}

Communicator::~Communicator() {
  if (log_ != nullptr) log_->on_look({});
  recorder::trace_leave(group_);
}

void Communicator::record_as(const std::string& name, const std::vector<std::uint64_t>& ranks) {
  if (transport_ != nullptr)
    log_ = recorder::Log::make(name, rank_, ranks, transport_description_,
                               transport_->group_state(), options_.log_waits);
  group_ = log_ != nullptr ? log_->number() : recorder::unlisted_group();
  recorder::trace_group(group_, name, rank_, ranks, transport_description_);
  if (transport_ == nullptr) return;
  send_recv_->record_as(group_, log_.get());
  transport_->group_state().on_peer_event(
      [log = log_.get()](const PeerEvent& event, CallStep step) {
        recorder::trace_wait(event);
        if (log != nullptr) log->record(event, step);
      });
  if (log_ == nullptr) return;
  failure_->record_in(log_.get());
  log_->on_look([this] { return_idle_pages(); });
}

void Communicator::close(const std::function<bool()>& is_interrupted) {
  queue_.drain([&] { abort_if(is_interrupted); });
  if (send_recv_ != nullptr) send_recv_->close(is_interrupted);
}

std::uint64_t Communicator::run(Collective&& call, const WaitLimits& limits) {
  validate(call);
  failure_->rethrow_if_any();
  std::exception_ptr error;
  const auto task = [&](std::uint64_t number) {
    error = error_of([&] { execute(call, limits, number); });
  };
  const auto run_part = [&](const Collective& part) {
    call.seq = run(Collective(part), limits);
    return Traffic{};
  };
  const auto poll = [&] { abort_if(limits.is_interrupted); };
  try {
    if (call.op == OpKind::kReduceUpdateGather && transport_ != nullptr &&
        !transport_->shares_memory())
      update_in_parts(call, rank_, world_size_, run_part);
    else
      queue_.run(std::ref(task), std::ref(poll));  // by reference: a copy would allocate
  } catch (const Error&) {  // of a part, or the call was made inside another one
    throw;
  } catch (const std::exception& no_thread_or_memory) {
    end_with(name_of(call.op), no_thread_or_memory);
  }
  if (error != nullptr) std::rethrow_exception(error);
  return call.seq;
}

OrderedQueue::Request Communicator::submit(const Collective& call, const WaitLimits& limits,
                                           Done done) {
  validate(call);
  failure_->rethrow_if_any();
  try {
    return queue_.submit(
        [this, call = call, limits, done = std::move(done)](std::uint64_t number) mutable {
          done(error_of([&] { execute(call, limits, number); }));
        });
  } catch (const Error&) {
    throw;
  } catch (const std::exception& no_thread_or_memory) {
    end_with(name_of(call.op), no_thread_or_memory);
  }
}

// The other ranks have continued, so the group ends: this rank's process may live on. In a catch
// block.
void Communicator::end_with(const std::string& where, const std::exception& error) {
  failure_->abort(where + ": " + error.what(), AbortReason::of(error, rank_).culprit);
  throw;
}

void Communicator::validate(const Collective& call) const {
  const bool has_root = call.op == OpKind::kBroadcast || call.op == OpKind::kReduce ||
                        call.op == OpKind::kGather || call.op == OpKind::kScatter;
  if (has_root && (call.root < 0 || call.root >= world_size_))
    throw std::invalid_argument("root must be a rank of the group, 0 to " +
                                std::to_string(world_size_ - 1) + ", got " +
                                std::to_string(call.root));
  // A rank's shard for itself is an argument error of that rank, not a mismatch between ranks.
  const std::size_t given = call.input_shard(rank_);
  const std::size_t taken = call.output_shard(rank_);
  if (given != taken)
    throw std::invalid_argument(
        std::string(name_of(call.op)) + ": rank " + std::to_string(rank_) +
        "'s own input shard has " + std::to_string(given * element_bytes(call.dtype)) +
        " bytes and its own output shard " + std::to_string(taken * element_bytes(call.dtype)) +
        "; they must be equal");
  check_overlap(call, rank_, world_size_);
  if (is_reduction(call.op)) reduce_op_of(call);
  if (call.op == OpKind::kReduceUpdateGather) make_update_op(call.update, call.dtype);
}

Algorithm Communicator::algorithm_of(Collective call) const {
  plan(call);
  return call.algorithm;
}

void Communicator::plan(Collective& call) const {
  if (transport_ != nullptr)
    transport_->plan(call);
  else
    call.algorithm = Algorithm::kDirect;
}

void Communicator::issue(Collective& call) {
  validate(call);
  failure_->rethrow_if_any();
  call.set_number(num_on_devices_.fetch_add(1), world_size_);
}

// Both run() and submit() lead here: in this rank's order of calls, on whatever thread.
void Communicator::execute(Collective& call, const WaitLimits& limits, std::uint64_t number) {
  failure_->rethrow_if_any();
  call.set_number(number, world_size_);
  plan(call);
  const auto event = [&] { return recorder::event_of(call, group_); };
  recorder::Span span(event);
  if (transport_ == nullptr) {
    run_in_group_of_one(call);
    stats_.count(call.op, {});
    return;
  }
  const recorder::Run run(log_.get(), event());
  const auto activity = [&] {
    return Activity{.op = name_of(call.op),
                    .seq = static_cast<std::int64_t>(call.seq),
                    .description = describe(call),
                    .timeout = limits.timeout,
                    .num_calls = static_cast<std::int64_t>(call.seq) + 1};
  };
  try {
    const Traffic traffic = transport_->run(call, limits);
    span.set_algorithm(traffic.algorithm);
    if (call.is_counted) stats_.count(call.op, traffic);
  } catch (const WaitFailed& failed) {
    failure_->raise_stopped(failed.status, failed.peer, activity(), failed.detail);
  } catch (const Mismatched& mismatched) {
    failure_->raise_mismatch(
        mismatched.peer,
        !mismatched.difference.empty()
            ? mismatched.difference
            : describe_difference(mismatched.peer, mismatched.theirs, name_of(call.op)),
        activity());
  } catch (const std::exception& error) {  // probably out of memory
    end_with(activity().description, error);
  }
}

void Communicator::return_idle_pages() {
  queue_.run_if_idle([this] { transport_->return_idle_pages(); });
  send_recv_->return_idle_pages();
}

}  // namespace ringcomm
