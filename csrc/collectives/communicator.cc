#include "collectives/communicator.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "collectives/carrier_registry.h"
#include "collectives/owner_update.h"
#include "collectives/reduce_update_gather.h"
#include "collectives/reduction.h"

namespace ringcomm {
namespace {

// What no rank could carry out, and what would have it read the board of a rank that is not there.
void check_op(const Collective& call, int world_size) {
  if (call.op == OpKind::kSend || call.op == OpKind::kRecv)
    throw std::invalid_argument(std::string(name_of(call.op)) + " is not a collective");
  if (call.op == OpKind::kAllReduce) check_all_reduce_algorithm(call.algorithm);
  const bool has_root = call.op == OpKind::kBroadcast || call.op == OpKind::kReduce;
  if (has_root && (call.root < 0 || call.root >= world_size))
    throw std::invalid_argument("root is a rank of the group, 0 to " +
                                std::to_string(world_size - 1) + ", got " +
                                std::to_string(call.root));
}

// In a group of one every output is its input, or that updated.
void run_alone(const Collective& call) {
  if (call.op == OpKind::kReduceUpdateGather) {
    const void* grad = call.inputs[0];
    OwnerUpdate(call, 0, 1).run(&grad, 1, {0, call.num_elems}, nullptr);
    return;
  }
  if (call.op == OpKind::kBarrier || call.num_bytes() == 0 || call.inputs[0] == call.outputs[0])
    return;
  std::memcpy(call.outputs[0], call.inputs[0], call.num_bytes());
}

}  // namespace

Communicator::Communicator(KeyValueStore& store, int rank, int world_size,
                           const CommunicatorOptions& options, std::chrono::milliseconds timeout)
    : rank_(rank), world_size_(world_size), options_(options) {
  options.validate();
  if (world_size > 1) carrier_ = make_carrier(store, rank, world_size, options, timeout);
  failure_ = std::make_unique<Failure>(carrier_ != nullptr ? &carrier_->membership() : nullptr,
                                       rank, world_size);
  if (carrier_ != nullptr) p2p_ = carrier_->make_p2p(*failure_, stats_);
}

Communicator::~Communicator() = default;

void Communicator::run(const Collective& call, const WaitLimits& limits) {
  validate(call);
  failure_->rethrow_if_any();
  std::exception_ptr error;
  const auto task = [&] {
    try {
      execute(call, limits);
    } catch (...) {
      error = std::current_exception();
    }
  };
  const auto poll = [&] {
    if (limits.is_interrupted && limits.is_interrupted()) abort("interrupted by a signal");
  };
  queue_.run(std::ref(task), std::ref(poll));  // by reference: a copy would allocate
  if (error != nullptr) std::rethrow_exception(error);
}

OrderedQueue::Ticket Communicator::submit(const Collective& call, const WaitLimits& limits,
                                          Done done) {
  validate(call);
  failure_->rethrow_if_any();
  return queue_.submit([this, call, limits, done = std::move(done)] {
    std::exception_ptr error;
    try {
      execute(call, limits);
    } catch (...) {
      error = std::current_exception();
    }
    done(error);
  });
}

void Communicator::validate(const Collective& call) const {
  check_op(call, world_size_);
  if (is_reduction(call.op)) reduce_op_of(call);
  if (call.op == OpKind::kReduceUpdateGather) {
    if (call.update == nullptr) throw std::invalid_argument("an update has an optimizer");
    host::make_update_op(call.update->spec, call.dtype);
  }
  options_.check_ring(call);
}

CallHeader Communicator::header_of(const Collective& call) {
  CallHeader header{.seq = next_seq_.fetch_add(1, std::memory_order_relaxed),
                    .num_elems = call.num_elems,
                    .root = call.root,
                    .op = call.op,
                    .dtype = call.dtype,
                    .reduction = call.reduction,
                    .algorithm = Algorithm::kDirect,
                    .is_uneven = call.is_uneven(),
                    .element_name = call.element_name,
                    .update = call.update != nullptr ? call.update->spec : UpdateSpec{}};
  if (carrier_ != nullptr) carrier_->plan(call, header);
  return header;
}

void Communicator::execute(const Collective& call, const WaitLimits& limits) {
  failure_->rethrow_if_any();
  const CallHeader header = header_of(call);
  if (carrier_ == nullptr) {
    run_alone(call);
    count(header, 0);
    return;
  }
  const auto activity = [&] {
    return Activity{.op = name_of(header.op),
                    .seq = static_cast<std::int64_t>(header.seq),
                    .description = describe(header),
                    .timeout = limits.timeout};
  };
  try {
    if (call.op == OpKind::kReduceUpdateGather && !carrier_->fuses_updates())
      count(header,
            reduce_update_gather_in_parts(call, rank_, world_size_, [&](const Collective& part) {
              return carrier_->run(part, header_of(part), limits);
            }));
    else
      count(header, carrier_->run(call, header, limits));
  } catch (const Stopped& stopped) {
    failure_->raise_stopped(stopped.stop, stopped.peer, activity());
  } catch (const Mismatched& mismatched) {
    failure_->raise_mismatch(mismatched.peer,
                             "rank " + std::to_string(mismatched.peer) + " called " +
                                 describe(mismatched.theirs) + " where rank " +
                                 std::to_string(rank_) + " called " + describe(header),
                             activity());
  } catch (const std::exception& error) {
    // Out of memory, most likely. Wherever this rank has stopped, the others have gone on.
    failure_->abort(activity().description + ": " + error.what());
    throw;
  }
}

void Communicator::count(const CallHeader& header, std::uint64_t sent_bytes) {
  stats_.count(header.op, header.algorithm, sent_bytes);
  Stats::process_wide().count(header.op, header.algorithm, sent_bytes);
}

}  // namespace ringcomm
