#include "collectives/hosts/agreement.h"

#include <cstring>
#include <string>
#include <vector>

namespace ringcomm {
namespace {

// A rank's record of its call: the header, and for every rank the elements that it sends to and
// expects from it. Zeros if the header is sufficient.
struct Sizes {
  std::vector<std::uint64_t> given, expected;
};

Sizes sizes_of(const Collective& call, int rank, int world_size) {
  Sizes sizes{.given = std::vector<std::uint64_t>(static_cast<std::size_t>(world_size)),
              .expected = std::vector<std::uint64_t>(static_cast<std::size_t>(world_size))};
  const auto root = static_cast<std::size_t>(call.root);
  const bool is_root = rank == call.root;
  if (call.op == OpKind::kGather) sizes.given[root] = call.num_elems;
  if (call.op == OpKind::kScatter) sizes.expected[root] = call.num_elems;
  for (int peer = 0; peer < world_size; ++peer) {
    const auto idx = static_cast<std::size_t>(peer);
    switch (call.op) {
      case OpKind::kReduceScatter:
      case OpKind::kAllGather:
      case OpKind::kAllToAll:
        sizes.given[idx] = call.input_share(peer);
        sizes.expected[idx] = call.output_share(peer);
        break;
      case OpKind::kGather:
        if (is_root) sizes.expected[idx] = call.output_share(peer);
        break;
      case OpKind::kScatter:
        if (is_root) sizes.given[idx] = call.input_share(peer);
        break;
      default:
        break;
    }
  }
  return sizes;
}

bool has_shares(OpKind op) {
  return op == OpKind::kReduceScatter || op == OpKind::kAllGather || op == OpKind::kGather ||
         op == OpKind::kScatter || op == OpKind::kAllToAll;
}

// The concatenated records of this host's ranks.
class Records {
 public:
  explicit Records(const HostsEngine& engine)
      : world_size_(static_cast<std::size_t>(engine.world_size())),
        bytes_(static_cast<std::size_t>(engine.local_size()) * num_bytes()) {}

  std::size_t num_bytes() const {
    return sizeof(CallHeader) + 2 * world_size_ * sizeof(std::uint64_t);
  }
  std::byte* of(int local) { return bytes_.data() + static_cast<std::size_t>(local) * num_bytes(); }

  void put(int local, const CallHeader& header, const Sizes& sizes) {
    const std::size_t table_bytes = world_size_ * sizeof(std::uint64_t);
    std::memcpy(of(local), &header, sizeof(header));
    std::memcpy(of(local) + sizeof(header), sizes.given.data(), table_bytes);
    std::memcpy(of(local) + sizeof(header) + table_bytes, sizes.expected.data(), table_bytes);
  }
  CallHeader header(int local) {
    CallHeader header;
    std::memcpy(&header, of(local), sizeof(header));
    return header;
  }
  std::uint64_t given(int local, int to) { return entry(local, static_cast<std::size_t>(to)); }
  std::uint64_t expected(int local, int from) {
    return entry(local, world_size_ + static_cast<std::size_t>(from));
  }

 private:
  std::uint64_t entry(int local, std::size_t idx) {
    std::uint64_t value = 0;
    std::memcpy(&value, of(local) + sizeof(CallHeader) + idx * sizeof(value), sizeof(value));
    return value;
  }

  std::size_t world_size_;
  std::vector<std::byte> bytes_;
};

class Comparison {
 public:
  Comparison(HostsEngine& engine, const CallHeader& header, Records& records)
      : engine_(engine), header_(header), records_(records) {}

  void compare_headers() {
    for (int local = 0; local < engine_.local_size(); ++local) {
      const CallHeader theirs = records_.header(local);
      const bool is_same =
          has_shares(header_.op) ? is_same_call(theirs, header_) : theirs == header_;
      if (!is_same) throw Mismatched{.peer = global(local), .theirs = theirs};
    }
  }

  // Compares all entries if every rank has a table of all shares, and otherwise the pairs of ranks
  // on this host. Pairs of ranks on two hosts are compared when the data arrives.
  void compare_sizes() {
    for (int from = 0; from < engine_.local_size(); ++from)
      for (int to = 0; to < engine_.local_size(); ++to)
        if (records_.given(from, global(to)) != records_.expected(to, global(from)))
          throw_mismatch(from, "rank " + std::to_string(global(from)) + " has " +
                                   bytes_text(records_.given(from, global(to))) + " for rank " +
                                   std::to_string(global(to)) + ", which expects " +
                                   bytes_text(records_.expected(to, global(from))));
    if (header_.op != OpKind::kReduceScatter && header_.op != OpKind::kAllGather) return;
    for (int local = 1; local < engine_.local_size(); ++local)
      for (int rank = 0; rank < engine_.world_size(); ++rank)
        if (share(local, rank) != share(0, rank))
          throw_mismatch(local, "the share of rank " + std::to_string(rank) + " has " +
                                    bytes_text(share(local, rank)) + " for rank " +
                                    std::to_string(global(local)) + ", and " +
                                    bytes_text(share(0, rank)) + " for rank " +
                                    std::to_string(global(0)));
  }

 private:
  int global(int local) const { return engine_.local_ranks()[static_cast<std::size_t>(local)]; }
  std::uint64_t share(int local, int rank) {
    return header_.op == OpKind::kReduceScatter ? records_.given(local, rank)
                                                : records_.expected(local, rank);
  }
  std::string bytes_text(std::uint64_t num_elems) const {
    return std::to_string(num_elems * element_bytes(header_.dtype)) + " bytes";
  }
  [[noreturn]] void throw_mismatch(int local, const std::string& difference) {
    throw Mismatched{
        .peer = global(local), .theirs = records_.header(local), .difference = difference};
  }

  HostsEngine& engine_;
  const CallHeader& header_;
  Records& records_;
};

}  // namespace

void agree_inside_host(HostsEngine& engine, const Collective& call, const CallHeader& header) {
  if (engine.local_size() == 1) return;
  Records records(engine);
  records.put(engine.local_rank(), header, sizes_of(call, engine.rank(), engine.world_size()));
  std::vector<void*> outputs;
  for (int local = 0; local < engine.local_size(); ++local) outputs.push_back(records.of(local));
  const void* inputs[] = {records.of(engine.local_rank())};
  engine.run_local({.op = OpKind::kAllGather,
                    .num_elems = records.num_bytes(),
                    .inputs = inputs,
                    .outputs = outputs.data()},
                   false);
  Comparison comparison(engine, header, records);
  comparison.compare_headers();
  comparison.compare_sizes();
}

HostsGreeting::HostsGreeting(HostsEngine& engine, const CallHeader& header) : engine_(engine) {
  if (!engine.is_leader()) return;
  const int num_hosts = engine.peer_table().num_hosts();
  exchange_.emplace(engine.leaders(), header);
  exchange_->recv((engine.host() + num_hosts - 1) % num_hosts, nullptr, 0);
  exchange_->send((engine.host() + 1) % num_hosts, nullptr, 0);
}

void HostsGreeting::finish() {
  if (!exchange_) return;
  std::vector<int> leaders;
  for (int host = 0; host < engine_.peer_table().num_hosts(); ++host)
    leaders.push_back(engine_.peer_table().leader_of(host));
  engine_.in_numbers_of(leaders, [&] { exchange_->finish(); });
  exchange_.reset();
}

}  // namespace ringcomm
