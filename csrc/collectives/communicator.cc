#include "collectives/communicator.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "collectives/owner_update.h"
#include "collectives/reduction.h"
#include "collectives/traced_p2p.h"
#include "collectives/update_in_parts.h"

namespace ringcomm {
namespace {

// Rejects calls that no rank can run, and roots outside the group.
void check_op(const Collective& call, int world_size) {
  if (call.op == OpKind::kSend || call.op == OpKind::kRecv)
    throw std::invalid_argument(std::string(name_of(call.op)) + " is not a collective");
  const bool has_root = call.op == OpKind::kBroadcast || call.op == OpKind::kReduce ||
                        call.op == OpKind::kGather || call.op == OpKind::kScatter;
  if (has_root && (call.root < 0 || call.root >= world_size))
    throw std::invalid_argument("root must be a rank of the group, 0 to " +
                                std::to_string(world_size - 1) + ", got " +
                                std::to_string(call.root));
}

// A rank's share for itself is an argument error of that rank, not a mismatch between ranks.
void check_own_share(const Collective& call, int rank) {
  const std::size_t given = call.input_share(rank);
  const std::size_t taken = call.output_share(rank);
  if (given != taken)
    throw std::invalid_argument(std::string(name_of(call.op)) + ": rank " + std::to_string(rank) +
                                " has " + std::to_string(given * element_bytes(call.dtype)) +
                                " bytes for itself, and room for " +
                                std::to_string(taken * element_bytes(call.dtype)));
}

// In a group of one every output is its input, or that updated.
void run_alone(const Collective& call) {
  if (call.op == OpKind::kReduceUpdateGather) {
    const void* grad = call.inputs[0];
    OwnerUpdate(call, 0, 1).run(&grad, 1, {0, call.num_elems}, nullptr);
    return;
  }
  if (call.op == OpKind::kBarrier) return;
  const std::size_t num_bytes = call.input_share(0) * element_bytes(call.dtype);
  if (num_bytes == 0 || call.inputs[0] == call.outputs[0]) return;
  std::memcpy(call.outputs[0], call.inputs[0], num_bytes);
}

trace::Event event_of(const Collective& call, const CallHeader& header, std::uint32_t group) {
  return {.seq = header.seq,
          .num_bytes = call.num_bytes(),
          .group = group,
          .root = header.root,
          .kind = trace::Kind::kCollective,
          .name = trace::name_number(name_of(header.op)),
          .dtype = trace::name_number(name_of(header.dtype)),
          .reduction = is_reduction(header.op) ? trace::name_number(name_of(header.reduction))
                                               : std::uint8_t{0},
          .algorithm = trace::name_number(name_of(header.algorithm))};
}

}  // namespace

Communicator::Communicator(KeyValueStore& store, int rank, int world_size,
                           const CommunicatorOptions& options, std::chrono::milliseconds timeout,
                           const MakeMessages& make_messages, const KnownProcesses& known)
    : rank_(rank), world_size_(world_size), options_(options) {
  options.validate();
  if (world_size > 1) {
    auto chosen = make_carrier(store, rank, world_size, options, make_messages, known, timeout);
    carrier_ = std::move(chosen.carrier);
    transport_ = std::move(chosen.reason);
    if (!carrier_->runs_in_caller()) queue_.leave_to_thread();
  }
  check_algorithm(options.algorithm);
  failure_ = std::make_unique<Failure>(carrier_ != nullptr ? &carrier_->membership() : nullptr,
                                       rank, world_size);
  if (carrier_ != nullptr) p2p_ = carrier_->make_p2p(*failure_, stats_);
}

Communicator::~Communicator() { trace::leave_group(trace_group_); }

void Communicator::trace_as(const std::string& name, const std::vector<std::uint64_t>& ranks) {
  trace_group_ = trace::add_group(name, rank_, ranks, transport_);
  if (p2p_ != nullptr) p2p_ = std::make_unique<TracedP2p>(std::move(p2p_), trace_group_);
}

void Communicator::close(const std::function<bool()>& is_interrupted) {
  queue_.drain([&] {
    if (is_interrupted && is_interrupted()) abort("interrupted by a signal");
  });
  if (p2p_ != nullptr) p2p_->close(is_interrupted);
}

template <typename Body>
void Communicator::run_in_order(const Body& body, const WaitLimits& limits) {
  failure_->rethrow_if_any();
  num_issued_.fetch_add(1, std::memory_order_relaxed);
  std::exception_ptr error;
  const auto task = [&] {
    try {
      body();
    } catch (...) {
      error = std::current_exception();
    }
  };
  const auto poll = [&] {
    if (limits.is_interrupted && limits.is_interrupted()) abort("interrupted by a signal");
  };
  try {
    queue_.run(std::ref(task), std::ref(poll));  // by reference: a copy would allocate
  } catch (...) {                                // it is not in the queue, and so was not called
    num_issued_.fetch_sub(1, std::memory_order_relaxed);
    throw;
  }
  if (error != nullptr) std::rethrow_exception(error);
}

template <typename Body>
OrderedQueue::Ticket Communicator::submit_in_order(Body body, Done done) {
  failure_->rethrow_if_any();
  auto ticket = queue_.submit([body = std::move(body), done = std::move(done)] {
    std::exception_ptr error;
    try {
      body();
    } catch (...) {
      error = std::current_exception();
    }
    done(error);
  });
  // Counted after it is queued: if its thread cannot be started, the call did not happen.
  num_issued_.fetch_add(1, std::memory_order_relaxed);
  return ticket;
}

void Communicator::run(const Collective& call, const WaitLimits& limits) {
  validate(call);
  run_in_order([&] { execute(call, limits); }, limits);
}

void Communicator::run(const Sequence& sequence, const WaitLimits& limits) {
  run_in_order([&] { execute(sequence, limits); }, limits);
}

OrderedQueue::Ticket Communicator::submit(const Collective& call, const WaitLimits& limits,
                                          Done done) {
  validate(call);
  return submit_in_order([this, call, limits] { execute(call, limits); }, std::move(done));
}

OrderedQueue::Ticket Communicator::submit(Sequence sequence, const WaitLimits& limits, Done done) {
  return submit_in_order(
      [this, sequence = std::move(sequence), limits] { execute(sequence, limits); },
      std::move(done));
}

void Communicator::check_algorithm(Algorithm algorithm) const {
  check_all_reduce_algorithm(
      algorithm, carrier_ != nullptr ? carrier_->all_reduce_algorithms() : kAllReduceAlgorithms,
      transport_);
}

void Communicator::validate(const Collective& call) const {
  check_op(call, world_size_);
  if (call.op == OpKind::kAllReduce) check_algorithm(call.algorithm);
  check_own_share(call, rank_);
  if (is_reduction(call.op)) reduce_op_of(call);
  if (call.op == OpKind::kReduceUpdateGather) {
    if (call.update == nullptr) throw std::invalid_argument("an update needs an optimizer");
    make_update_op(call.update->spec, call.dtype);
  }
  options_.check_ring(call);
}

Algorithm Communicator::algorithm_of(const Collective& call) const {
  CallHeader header{.algorithm = Algorithm::kDirect};
  if (carrier_ != nullptr) carrier_->plan(call, header);
  return header.algorithm;
}

CallHeader Communicator::header_of(const Collective& call, std::uint64_t seq) const {
  return {.seq = seq,
          .num_elems = call.num_elems,
          .root = call.root,
          .op = call.op,
          .dtype = call.dtype,
          .reduction = call.reduction,
          .algorithm = Algorithm::kDirect,
          .is_uneven = call.is_uneven(world_size_),
          .has_update = call.update != nullptr,
          .element_name = call.element_name,
          .update = call.update != nullptr ? call.update->spec : UpdateSpec{}};
}

CallHeader Communicator::issue(const Collective& call) {
  validate(call);
  failure_->rethrow_if_any();
  return header_of(call, num_issued_.fetch_add(1, std::memory_order_relaxed));
}

CallHeader Communicator::planned(const Collective& call) {
  CallHeader header = header_of(call, num_run_++);
  if (carrier_ != nullptr) carrier_->plan(call, header);
  return header;
}

void Communicator::execute(const Collective& call, const WaitLimits& limits) {
  failure_->rethrow_if_any();
  const CallHeader header = planned(call);
  trace::Span traced([&] { return event_of(call, header, trace_group_); });
  if (carrier_ == nullptr) {
    run_alone(call);
    count(header.op, {});
    return;
  }
  const auto activity = [&] {
    return Activity{.op = name_of(header.op),
                    .seq = static_cast<std::int64_t>(header.seq),
                    .description = describe(header),
                    .timeout = limits.timeout,
                    .num_calls = static_cast<std::int64_t>(header.seq) + 1};
  };
  try {
    const bool is_in_parts = call.op == OpKind::kReduceUpdateGather && !carrier_->fuses_updates();
    const Traffic traffic =
        is_in_parts
            ? update_in_parts(call, rank_, world_size_,
                              [&](const Collective& part) { return run_part(part, limits); })
            : carrier_->run(call, header, limits);
    traced.set_algorithm(name_of(traffic.algorithm));
    if (call.is_counted) count(header.op, traffic);
  } catch (const Stopped& stopped) {
    failure_->raise_stopped(stopped.stop, stopped.peer, activity(), stopped.detail);
  } catch (const Mismatched& mismatched) {
    failure_->raise_mismatch(
        mismatched.peer,
        !mismatched.difference.empty()
            ? mismatched.difference
            : describe_difference(mismatched.peer, mismatched.theirs, name_of(header.op)),
        activity());
  } catch (const std::exception& error) {
    // Probably out of memory. The other ranks have continued, so the group ends.
    failure_->abort(activity().description + ": " + error.what());
    throw;
  }
}

// One part of an update that the carrier cannot fuse.
Traffic Communicator::run_part(const Collective& part, const WaitLimits& limits) {
  const CallHeader header = planned(part);
  const trace::Span traced([&] { return event_of(part, header, trace_group_); });
  return carrier_->run(part, header, limits);
}

void Communicator::execute(const Sequence& sequence, const WaitLimits& limits) {
  Steps steps(*this, limits);
  try {
    sequence(steps);
  } catch (const Error&) {  // from a step, which has ended the group
    throw;
  } catch (const std::exception& error) {
    // The other ranks have continued, so the group ends.
    failure_->abort(error.what());
    throw;
  }
}

void Communicator::Steps::run(const Collective& call) {
  communicator_.validate(call);
  communicator_.execute(call, limits_);
}

void Communicator::Steps::raise_mismatch(const char* op, int peer, const std::string& difference,
                                         std::string description) {
  const auto seq = static_cast<std::int64_t>(communicator_.num_run_) - 1;
  if (description.empty()) description = std::string(op) + " #" + std::to_string(seq);
  communicator_.failure_->raise_mismatch(
      peer, difference, {.op = op, .seq = seq, .description = std::move(description)});
}

void Communicator::count(OpKind op, const Traffic& traffic) {
  for (Stats* stats : {&stats_, &Stats::process_wide()})
    stats->count(op, traffic.algorithm, traffic.sent_bytes, traffic.copied_bytes);
}

}  // namespace ringcomm
