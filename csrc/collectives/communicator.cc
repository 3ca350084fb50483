#include "collectives/communicator.h"

#include <cstring>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "collectives/algorithm_choice.h"
#include "collectives/all_reduce.h"
#include "collectives/board_collectives.h"
#include "collectives/reduction.h"

namespace ringcomm {
namespace {

shm::SegmentConfig segment_config(const CommunicatorOptions& options) {
  shm::SegmentConfig config;
  config.ring_num_slots = options.num_slots;
  config.ring_slot_bytes = options.slot_bytes;
  return config;
}

void check_algorithm(Algorithm algorithm) {
  if (algorithm == Algorithm::kDirect)
    throw std::invalid_argument("direct is no algorithm of all_reduce");
}

// What no rank could carry out, and what would have it read the board of a rank that is not there.
void check_op(const Collective& call, int world_size) {
  if (call.op == OpKind::kSend || call.op == OpKind::kRecv)
    throw std::invalid_argument(std::string(name_of(call.op)) + " is not a collective");
  if (call.op == OpKind::kAllReduce) check_algorithm(call.algorithm);
  const bool has_root = call.op == OpKind::kBroadcast || call.op == OpKind::kReduce;
  if (has_root && (call.root < 0 || call.root >= world_size))
    throw std::invalid_argument("root is a rank of the group, 0 to " +
                                std::to_string(world_size - 1) + ", got " +
                                std::to_string(call.root));
}

// In a group of one every output is its input.
void run_alone(const Collective& call) {
  if (call.op == OpKind::kBarrier || call.num_bytes() == 0 || call.inputs[0] == call.outputs[0])
    return;
  std::memcpy(call.outputs[0], call.inputs[0], call.num_bytes());
}

}  // namespace

std::string CommunicatorOptions::to_text() const {
  std::ostringstream text;
  text << "algorithm=" << name_of(algorithm) << " num_slots=" << num_slots
       << " slot_bytes=" << slot_bytes;
  return text.str();
}

void CommunicatorOptions::validate() const {
  check_algorithm(algorithm);
  if (num_slots < 2 || num_slots > 64)
    throw std::invalid_argument(
        "num_slots is 2 to 64 (with one slot the ranks of a ring would wait for each other "
        "for ever), got " +
        std::to_string(num_slots));
  if (slot_bytes < 64 || slot_bytes > (std::size_t{64} << 20) || slot_bytes % 64 != 0)
    throw std::invalid_argument("slot_bytes is a multiple of 64 from 64 to 67108864, got " +
                                std::to_string(slot_bytes));
}

Communicator::Communicator(KeyValueStore& store, int rank, int world_size,
                           const CommunicatorOptions& options, std::chrono::milliseconds timeout)
    : rank_(rank), world_size_(world_size), options_(options) {
  options.validate();
  if (world_size > 1)
    group_ = std::make_unique<shm::Group>(
        store,
        shm::GroupIdentity{.rank = rank, .world_size = world_size, .options = options.to_text()},
        segment_config(options), timeout);
  failure_ = std::make_unique<Failure>(group_.get(), rank, world_size);
  if (group_ == nullptr) return;
  scope_ = std::make_unique<shm::WaitScope>(*group_);
  engine_ = std::make_unique<Engine>(*group_, *scope_);
  p2p_ = std::make_unique<P2pEngine>(*group_, *failure_, stats_);
}

Communicator::~Communicator() = default;

template <typename Body>
void Communicator::run_in_order(const Body& body, const shm::WaitLimits& limits) {
  failure_->rethrow_if_any();
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
  queue_.run(std::ref(task), std::ref(poll));  // by reference: a copy would allocate
  if (error != nullptr) std::rethrow_exception(error);
}

template <typename Body>
OrderedQueue::Ticket Communicator::submit_in_order(Body body, Done done) {
  failure_->rethrow_if_any();
  return queue_.submit([body = std::move(body), done = std::move(done)] {
    std::exception_ptr error;
    try {
      body();
    } catch (...) {
      error = std::current_exception();
    }
    done(error);
  });
}

void Communicator::run(const Collective& call, const shm::WaitLimits& limits) {
  validate(call);
  run_in_order([&] { execute(call, limits); }, limits);
}

void Communicator::run(const Sequence& sequence, const shm::WaitLimits& limits) {
  run_in_order([&] { execute(sequence, limits); }, limits);
}

OrderedQueue::Ticket Communicator::submit(const Collective& call, const shm::WaitLimits& limits,
                                          Done done) {
  validate(call);
  return submit_in_order([this, call, limits] { execute(call, limits); }, std::move(done));
}

OrderedQueue::Ticket Communicator::submit(Sequence sequence, const shm::WaitLimits& limits,
                                          Done done) {
  return submit_in_order(
      [this, sequence = std::move(sequence), limits] { execute(sequence, limits); },
      std::move(done));
}

void Communicator::validate(const Collective& call) const {
  check_op(call, world_size_);
  if (is_reduction(call.op)) reduce_op_of(call);
  if (call.ring_num_slots == 0 && call.ring_slot_bytes == 0) return;
  const CommunicatorOptions asked = ring_options(call);
  asked.validate();
  if (asked.num_slots * asked.slot_bytes > options_.num_slots * options_.slot_bytes)
    throw std::invalid_argument(
        std::to_string(asked.num_slots) + " slots of " + std::to_string(asked.slot_bytes) +
        " bytes do not fit the group's links of " +
        std::to_string(options_.num_slots * options_.slot_bytes) +
        " bytes; make the group with a larger slot_bytes in ringcomm.Options");
}

// How the call wants the ring's links cut: as it says, else as the group does, else in slots that
// fill them.
CommunicatorOptions Communicator::ring_options(const Collective& call) const {
  CommunicatorOptions asked = options_;
  if (call.ring_num_slots != 0) {
    asked.num_slots = call.ring_num_slots;
    asked.slot_bytes = options_.num_slots * options_.slot_bytes / call.ring_num_slots / 64 * 64;
  }
  if (call.ring_slot_bytes != 0) asked.slot_bytes = call.ring_slot_bytes;
  return asked;
}

CallHeader Communicator::header_of(const Collective& call) {
  CallHeader header{.seq = next_seq_.fetch_add(1, std::memory_order_relaxed),
                    .num_elems = call.num_elems,
                    .root = call.root,
                    .op = call.op,
                    .dtype = call.dtype,
                    .reduction = call.reduction,
                    .algorithm = Algorithm::kDirect,
                    .element_name = call.element_name};
  if (call.op != OpKind::kAllReduce) return header;
  header.algorithm = call.algorithm != Algorithm::kAuto ? call.algorithm : options_.algorithm;
  if (header.algorithm == Algorithm::kAuto)
    header.algorithm = choose_all_reduce(call.num_bytes(), world_size_);
  if (header.algorithm == Algorithm::kRing) {
    const CommunicatorOptions cut = ring_options(call);
    header.ring_num_slots = cut.num_slots;
    header.ring_slot_bytes = cut.slot_bytes;
  }
  return header;
}

void Communicator::execute(const Collective& call, const shm::WaitLimits& limits) {
  failure_->rethrow_if_any();
  const CallHeader header = header_of(call);
  if (group_ == nullptr) {
    run_alone(call);
    count(header, 0);
    return;
  }
  scope_->begin(limits);
  const auto activity = [&] {
    return Activity{.op = name_of(header.op),
                    .seq = static_cast<std::int64_t>(header.seq),
                    .description = describe(header),
                    .timeout = limits.timeout};
  };
  try {
    engine_->store_kinds().begin(call.op, call.num_bytes());
    count(header, dispatch(call, header));
    engine_->store_kinds().end();
  } catch (const Stopped& stopped) {
    failure_->raise_stopped(stopped.stop, scope_->awaited_peer(), activity());
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

void Communicator::execute(const Sequence& sequence, const shm::WaitLimits& limits) {
  Steps steps(*this, limits);
  try {
    sequence(steps);
  } catch (const Error&) {  // from a step, which has ended the group
    throw;
  } catch (const std::exception& error) {
    // Wherever this rank has stopped, the others have gone on.
    failure_->abort(error.what());
    throw;
  }
}

void Communicator::Steps::run(const Collective& call) {
  communicator_.validate(call);
  communicator_.execute(call, limits_);
}

void Communicator::Steps::raise_mismatch(const char* op, int peer, const std::string& difference) {
  const auto seq = static_cast<std::int64_t>(communicator_.next_seq()) - 1;
  communicator_.failure_->raise_mismatch(
      peer, difference,
      {.op = op, .seq = seq, .description = std::string(op) + " #" + std::to_string(seq)});
}

std::uint64_t Communicator::dispatch(const Collective& call, const CallHeader& header) {
  switch (call.op) {
    case OpKind::kBarrier:
      return barrier(*engine_, header);
    case OpKind::kReduce:
      return reduce(*engine_, call, header);
    case OpKind::kReduceScatter:
      return reduce_scatter(*engine_, call, header);
    case OpKind::kAllGather:
      return all_gather(*engine_, call, header);
    case OpKind::kBroadcast:
      return broadcast(*engine_, call, header);
    case OpKind::kAllReduce:
      switch (header.algorithm) {
        case Algorithm::kOneShot:
          return all_reduce_one_shot(*engine_, call, header);
        case Algorithm::kRing:
          return all_reduce_ring(*engine_, call, header);
        default:
          return all_reduce_two_shot(*engine_, call, header);
      }
    case OpKind::kSend:
    case OpKind::kRecv:
      break;
  }
  throw std::invalid_argument(std::string(name_of(call.op)) + " is not a collective");
}

void Communicator::count(const CallHeader& header, std::uint64_t sent_bytes) {
  stats_.count(header.op, header.algorithm, sent_bytes);
  Stats::process_wide().count(header.op, header.algorithm, sent_bytes);
}

}  // namespace ringcomm
