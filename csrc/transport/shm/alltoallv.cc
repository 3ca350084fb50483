#include <cstring>
#include <vector>

#include "collectives/call_header.h"
#include "collectives/collective.h"
#include "collectives/op_kind.h"
#include "core/shard_layout.h"
#include "transport/shm/collectives.h"

namespace ringcomm {
namespace {

// One call whose shards may differ in size: their sizes, and the addresses of the shards in this
// rank's buffers and, piece by piece, in the regions.
//
// A rank knows only its own sizes, and a mismatch is between two ranks. So every rank publishes its
// sizes in the first phase, before the data: a table of one 64-bit count per rank (two tables in
// all_to_all: sizes to send and to receive), or nothing if the header's num_elems is sufficient.
// Every rank then compares all pairs, so all ranks fail with the same message and need not notify
// each other. The room for the tables is there even where they are not filled: ranks with even and
// with uneven shards may be of one call, and must agree on where data begins.
class Alltoallv {
 public:
  Alltoallv(ShmContext& context, const Collective& call)
      : context_(context),
        call_(call),
        rank_(context.rank()),
        world_size_(context.world_size()),
        element_bytes_(element_bytes(call.dtype)),
        table_bytes_(static_cast<std::size_t>(world_size_) * sizeof(std::uint64_t)),
        // In whole lines, so that data is aligned for any vector.
        tables_bytes_((table_bytes_ * (call.op == OpKind::kAllToAll ? 2 : 1) + kLineBytes - 1) /
                      kLineBytes * kLineBytes),
        peers_(static_cast<std::size_t>(world_size_)),
        counts_(static_cast<std::size_t>(world_size_ * (world_size_ + 1))),
        layout_{call.op == OpKind::kAllGather ? ShardLayout::Kind::kToAll
                : is_reduction(call.op)       ? ShardLayout::Kind::kReduced
                                              : ShardLayout::Kind::kToEach,
                world_size_, (context.phase_bytes() - tables_bytes_) / element_bytes_,
                counts_.data(), counts_.data() + world_size_ * world_size_} {
    const bool is_silent = call.op == OpKind::kScatter && rank_ != call.root;
    for (int to = 0; to < world_size_ && !is_silent; ++to)
      if (call.op != OpKind::kGather || to == call.root)
        layout_.elems(rank_, to) = call.input_shard(to);
    layout_.count_pieces(rank_);
  }

  // Returns the bytes that peers consumed.
  std::uint64_t run() {
    std::size_t num_phases = 1;  // until the sizes are known; then equal on all ranks
    for (std::size_t piece_idx = 0; piece_idx < num_phases; ++piece_idx) {
      is_first_ = piece_idx == 0;
      context_.step() = {1, 1, piece_idx + 1, num_phases};
      stage(piece_idx);
      static_cast<void>(context_.publish());  // no buffers of these calls are shared
      if (is_first_) {
        compare_sizes();
        for (int from = 0; from < world_size_; ++from) layout_.count_pieces(from);
        num_phases = layout_.num_phases();
        keep_inputs();
      }
      if (is_reduction(call_.op))
        reduce(piece_idx);
      else
        copy(piece_idx);
    }
    std::size_t sent_elems = 0;
    for (int to = 0; to < world_size_; ++to)
      if (to != rank_) sent_elems += layout_.elems(rank_, to);
    return sent_elems * element_bytes_;
  }

  // Reads the sizes of all ranks, in the first phase. Throws Mismatched.
  void compare_sizes() {
    for (int rank = 0; rank < world_size_; ++rank) {
      Peer& peer = peers_[static_cast<std::size_t>(rank)];
      peer.header = context_.header_of(rank);
      if (rank != rank_) peer.tables = context_.wait(rank);
    }
    for (int from = 0; from < world_size_; ++from)
      for (int to = 0; to < world_size_; ++to) {
        layout_.elems(from, to) = given(from, to);
        if (given(from, to) != expected(from, to)) throw_mismatch(from, to);
      }
  }

 private:
  struct Peer {
    CallHeader header;
    const std::byte* tables = nullptr;  // in its region of the first phase
  };

  // ---- sizes

  const CallHeader& header_of(int rank) const {
    return peers_[static_cast<std::size_t>(rank)].header;
  }

  // Entry `entry` of the tables of `rank`, or num_elems of its header if it has no tables.
  std::size_t published(int rank, int entry) {
    if (!header_of(rank).is_uneven) return header_of(rank).num_elems;
    std::uint64_t elems = 0;
    std::memcpy(&elems,
                peers_[static_cast<std::size_t>(rank)].tables +
                    static_cast<std::size_t>(entry) * sizeof(elems),
                sizeof(elems));
    return elems;
  }

  // The size that `from` published for `to`.
  std::size_t given(int from, int to) {
    switch (call_.op) {
      case OpKind::kAllGather:
        return header_of(from).num_elems;
      case OpKind::kGather:
        return to == call_.root ? header_of(from).num_elems : 0;
      case OpKind::kScatter:
        return from == call_.root ? published(from, to) : 0;
      default:
        return published(from, to);
    }
  }

  // The size that `to` expects from `from`.
  std::size_t expected(int from, int to) {
    switch (call_.op) {
      case OpKind::kAllGather:
        return published(to, from);
      case OpKind::kGather:
        return to == call_.root ? published(to, from) : 0;
      case OpKind::kScatter:
        return from == call_.root ? header_of(to).num_elems : 0;
      case OpKind::kAllToAll:
        return published(to, world_size_ + from);
      default:
        return header_of(to).num_elems;
    }
  }

  [[noreturn]] void throw_mismatch(int from, int to) {
    const int peer = from == rank_ ? to : from;
    throw Mismatched{.peer = peer,
                     .theirs = header_of(peer),
                     .difference = size_difference(from, given(from, to) * element_bytes_, to,
                                                   expected(from, to) * element_bytes_)};
  }

  // ---- pieces

  // Copies inputs that would be overwritten. Pieces of one number on all ranks would take a phase
  // more in every uneven call, because the first one has data before they know.
  void keep_inputs() {
    for (int peer = 0; peer < world_size_ && call_.op == OpKind::kAllToAll; ++peer) {
      if (peer == rank_ || call_.inputs[peer] != call_.outputs[peer]) continue;
      if (!layout_.overwrites(rank_, peer)) continue;
      const auto* input = static_cast<const std::byte*>(call_.inputs[peer]);
      kept_.resize(peers_.size());
      kept_[static_cast<std::size_t>(peer)].assign(
          input, input + layout_.elems(rank_, peer) * element_bytes_);
    }
  }

  const void* input(int to) const {
    const auto idx = static_cast<std::size_t>(to);
    if (!kept_.empty() && !kept_[idx].empty()) return kept_[idx].data();
    const bool has_one = call_.op == OpKind::kAllGather || call_.op == OpKind::kGather;
    return call_.inputs[has_one ? 0 : to];
  }
  void* output(int from) const {
    const bool has_one = call_.op == OpKind::kScatter || is_reduction(call_.op);
    return call_.outputs[has_one ? 0 : from];
  }

  void stage(std::size_t piece_idx) {
    std::byte* region = nullptr;
    if (is_first_) {
      region = context_.open();
      peers_[static_cast<std::size_t>(rank_)].tables = region;
      std::byte* table = region;
      for (const std::size_t* sizes : {call_.input_elems, call_.output_elems}) {
        if (sizes == nullptr || !context_.header().is_uneven) continue;
        std::memcpy(table, sizes, table_bytes_);
        table += table_bytes_;
      }
      region += tables_bytes_;
    }
    for (int to = 0; to < world_size_; ++to) {
      const ElemRange part = layout_.slice(rank_, to, piece_idx);
      if (!layout_.is_staged(rank_, to) || part.num_elems == 0) continue;
      if (region == nullptr) region = context_.open();
      const std::size_t num_bytes = part.num_elems * element_bytes_;
      context_.stage(region, at(input(to), part.begin_elems, element_bytes_), num_bytes);
      region += num_bytes;
    }
  }

  // The data that `from` has for this rank in this phase.
  const std::byte* received(int from, const ElemRange& part, std::size_t piece_idx) {
    if (from == rank_) return at(input(rank_), part.begin_elems, element_bytes_);
    return context_.wait(from) + (is_first_ ? tables_bytes_ : 0) +
           layout_.offset_elems(from, rank_, piece_idx) * element_bytes_;
  }

  void copy(std::size_t piece_idx) {
    std::size_t result_elems = 0;
    for (int from = 0; from < world_size_; ++from) result_elems += layout_.elems(from, rank_);
    for (int distance = 0; distance < world_size_; ++distance) {
      const int from = (rank_ + distance) % world_size_;
      const ElemRange part = layout_.slice(from, rank_, piece_idx);
      if (part.num_elems > 0)
        context_.copy_result(at(output(from), part.begin_elems, element_bytes_),
                             received(from, part, piece_idx), part.num_elems * element_bytes_,
                             result_elems * element_bytes_);
    }
  }

  void reduce(std::size_t piece_idx) {
    const ElemRange part = layout_.slice(rank_, rank_, piece_idx);  // the same from every rank
    if (part.num_elems == 0) return;
    const void** sources = context_.sources();
    for (int from = 0; from < world_size_; ++from) sources[from] = received(from, part, piece_idx);
    reduce_op_of(call_).combine(at(output(rank_), part.begin_elems, element_bytes_), nullptr,
                                sources, world_size_, part.num_elems,
                                divisor_of(call_, world_size_));
  }

  ShmContext& context_;
  const Collective& call_;
  int rank_;
  int world_size_;
  std::size_t element_bytes_;
  std::size_t table_bytes_;          // of one
  std::size_t tables_bytes_;         // of the room for all
  std::vector<Peer> peers_;          // by rank
  std::vector<std::size_t> counts_;  // the tables of the layout
  ShardLayout layout_;
  std::vector<std::vector<std::byte>> kept_;  // by rank, if any: see keep_inputs()
  bool is_first_ = true;
};

}  // namespace

std::uint64_t alltoallv(ShmContext& context, const Collective& call) {
  return Alltoallv(context, call).run();
}

void explain_mismatch(ShmContext& context, const Collective& call) {
  Alltoallv(context, call).compare_sizes();
}

}  // namespace ringcomm
