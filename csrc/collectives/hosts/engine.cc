#include "collectives/hosts/engine.h"

#include <algorithm>
#include <cstring>

#include "collectives/messages/tags.h"
#include "collectives/trace.h"

namespace ringcomm {
namespace {

std::vector<int> leaders_of(const PeerTable& peer_table) {
  std::vector<int> leaders;
  for (int host = 0; host < peer_table.num_hosts(); ++host)
    leaders.push_back(peer_table.leader_of(host));
  return leaders;
}

// On a host with one rank every output is its input; a broadcast needs no copy.
void run_alone(const Collective& call) {
  if (call.op == OpKind::kBarrier || call.op == OpKind::kBroadcast) return;
  const std::size_t num_bytes = call.input_share(0) * element_bytes(call.dtype);
  if (num_bytes > 0 && call.inputs[0] != call.outputs[0])
    std::memcpy(call.outputs[0], call.inputs[0], num_bytes);
}

}  // namespace

HostsEngine::HostsEngine(const PeerTable& peer_table, int rank, Carrier* local,
                         MessageTransport& transport, const MessageEngine::Cut& cut)
    : peer_table_(peer_table),
      rank_(rank),
      local_(local),
      transport_(transport),
      cut_(cut),
      all_(transport, cut) {
  if (!is_leader()) return;
  leaders_subset_ = std::make_unique<MessageSubset>(transport, leaders_of(peer_table),
                                                    MessageTags::kNumOfCollectives);
  leaders_ = std::make_unique<MessageEngine>(*leaders_subset_, cut);
}

void HostsEngine::begin(MessageWatch::Operation& operation, const CallHeader& header,
                        const WaitLimits& limits) {
  operation_ = &operation;
  header_ = &header;
  limits_ = &limits;
  deadline_ = deadline_after(limits.timeout);
  traffic_ = {.algorithm = header.algorithm};
  all_.begin(operation);
  if (leaders_ != nullptr) leaders_->begin(operation);
}

// all_ is last: the messages of the others use the memory that it stages.
void HostsEngine::finish() {
  if (some_ != nullptr) in_numbers_of(some_subset_->ranks(), [&] { some_->finish(); });
  if (leaders_ != nullptr) in_numbers_of(leaders_subset_->ranks(), [&] { leaders_->finish(); });
  all_.finish();
  drop();
}

void HostsEngine::drop() {
  some_.reset();
  some_subset_.reset();
  if (leaders_ != nullptr) leaders_->drop();
  all_.drop();
}

MessageEngine& HostsEngine::among(const std::vector<int>& ranks) {
  some_subset_ =
      std::make_unique<MessageSubset>(transport_, ranks, 2 * MessageTags::kNumOfCollectives);
  some_ = std::make_unique<MessageEngine>(*some_subset_, cut_);
  some_->begin(*operation_);
  return *some_;
}

WaitLimits HostsEngine::limits_left() const {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline_ - std::chrono::steady_clock::now());
  return {.timeout = std::clamp(left, std::chrono::milliseconds(1), limits_->timeout),
          .is_interrupted = limits_->is_interrupted};
}

void HostsEngine::run_local(const Collective& call, bool is_data) {
  if (local_ == nullptr) {
    run_alone(call);
    return;
  }
  CallHeader header{.seq = header_->seq,
                    .num_elems = call.num_elems,
                    .root = call.root,
                    .op = call.op,
                    .dtype = call.dtype,
                    .reduction = call.reduction,
                    .is_uneven = call.is_uneven(local_size()),
                    .element_name = call.element_name};
  local_->plan(call, header);
  const WaitLimits limits = limits_left();
  const trace::Span traced([&] {
    return trace::Event{.num_bytes = call.num_bytes(),
                        .kind = trace::Kind::kPart,
                        .name = trace::name_number(name_of(call.op)),
                        .algorithm = trace::name_number(name_of(header.algorithm))};
  });
  in_numbers_of(local_ranks(), [&] {
    try {
      const Traffic traffic = local_->run(call, header, limits);
      if (!is_data) return;
      traffic_.sent_bytes += traffic.sent_bytes;
      traffic_.copied_bytes += traffic.copied_bytes;
    } catch (const Stopped& stopped) {
      has_heard_of_abort_ = stopped.stop == Stop::kAborted;
      throw;
    }
  });
}

}  // namespace ringcomm
