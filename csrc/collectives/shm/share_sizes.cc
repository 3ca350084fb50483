#include "collectives/shm/share_sizes.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace ringcomm {
namespace {

std::size_t table_bytes(int world_size) {
  return static_cast<std::size_t>(world_size) * sizeof(std::uint64_t);
}

// In whole lines, so that data is aligned for any vector.
std::size_t tables_bytes(OpKind op, int world_size) {
  const std::size_t num_tables = op == OpKind::kAllToAll ? 2 : 1;
  return (num_tables * table_bytes(world_size) + kLineBytes - 1) / kLineBytes * kLineBytes;
}

static_assert(sizeof(std::size_t) == sizeof(std::uint64_t));

}  // namespace

ShareSizes::ShareSizes(Engine& engine, const Collective& call, const CallHeader& header)
    : engine_(engine),
      call_(call),
      header_(header),
      tables_bytes_(tables_bytes(call.op, engine.world_size())) {
  const auto world_size = static_cast<std::size_t>(engine.world_size());
  elems_.resize(world_size * world_size);
  headers_.resize(world_size);
  regions_.resize(world_size);
  const int rank = engine.rank();
  headers_[static_cast<std::size_t>(rank)] = header;
  const bool has_one_target = call.op == OpKind::kGather;
  const bool has_one_source = call.op == OpKind::kScatter;
  for (int to = 0; to < engine.world_size(); ++to)
    if ((!has_one_target || to == call.root) && (!has_one_source || rank == call.root))
      elems_[index(rank, to)] = call.input_share(to);
}

std::byte* ShareSizes::open_first() {
  std::byte* region = engine_.open_first(header_);
  regions_[static_cast<std::size_t>(engine_.rank())] = region;
  if (header_.is_uneven) {
    std::byte* table = region;
    for (const std::size_t* elems : {call_.input_elems, call_.output_elems}) {
      if (elems == nullptr) continue;
      std::memcpy(table, elems, table_bytes(engine_.world_size()));
      table += table_bytes(engine_.world_size());
    }
  }
  return region + tables_bytes_;
}

void ShareSizes::exchange() {
  const int world_size = engine_.world_size();
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == engine_.rank()) continue;
    CallHeader& theirs = headers_[static_cast<std::size_t>(peer)];
    regions_[static_cast<std::size_t>(peer)] = engine_.wait_header(peer, theirs);
    if (!is_same_call(theirs, header_)) throw Mismatched{peer, theirs};
  }
  for (int from = 0; from < world_size; ++from)
    for (int to = 0; to < world_size; ++to) {
      elems_[index(from, to)] = given(from, to);
      if (given(from, to) != expected(from, to)) throw_mismatch(from, to);
    }
}

// Entry `entry` of the tables of `rank`, or num_elems of its header if it has no tables.
std::size_t ShareSizes::told(int rank, std::size_t entry) const {
  const CallHeader& header = headers_[static_cast<std::size_t>(rank)];
  if (!header.is_uneven) return header.num_elems;
  std::uint64_t elems = 0;
  std::memcpy(&elems, tables_of(rank) + entry * sizeof(elems), sizeof(elems));
  return elems;
}

// The size that `from` published for `to`.
std::size_t ShareSizes::given(int from, int to) const {
  const std::size_t own = headers_[static_cast<std::size_t>(from)].num_elems;
  switch (header_.op) {
    case OpKind::kAllGather:
      return own;
    case OpKind::kGather:
      return to == header_.root ? own : 0;
    case OpKind::kScatter:
      return from == header_.root ? told(from, static_cast<std::size_t>(to)) : 0;
    default:
      return told(from, static_cast<std::size_t>(to));
  }
}

// The size that `to` expects from `from`.
std::size_t ShareSizes::expected(int from, int to) const {
  const std::size_t own = headers_[static_cast<std::size_t>(to)].num_elems;
  const auto entry = static_cast<std::size_t>(from);
  switch (header_.op) {
    case OpKind::kAllGather:
      return told(to, entry);
    case OpKind::kGather:
      return to == header_.root ? told(to, entry) : 0;
    case OpKind::kScatter:
      return from == header_.root ? own : 0;
    case OpKind::kAllToAll:
      return told(to, static_cast<std::size_t>(engine_.world_size()) + entry);
    default:
      return own;
  }
}

void ShareSizes::throw_mismatch(int from, int to) const {
  const std::size_t bytes = element_bytes(header_.dtype);
  const int peer = from == engine_.rank() ? to : from;
  throw Mismatched{.peer = peer,
                   .theirs = headers_[static_cast<std::size_t>(peer)],
                   .difference = "rank " + std::to_string(from) + " has " +
                                 std::to_string(given(from, to) * bytes) + " bytes for rank " +
                                 std::to_string(to) + ", which expects " +
                                 std::to_string(expected(from, to) * bytes) + " bytes"};
}

}  // namespace ringcomm
