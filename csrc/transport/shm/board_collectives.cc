#include <cstring>
#include <vector>

#include "collectives/call.h"
#include "core/chunk_layout.h"
#include "transport/shm/context.h"

namespace ringcomm {
namespace {

// One call whose shards may differ in size: their sizes, and the addresses of the shards in this
// rank's buffers and, piece by piece, in the regions (docs/design/collectives.md, "Shards of
// different sizes"). A rank with uneven shards publishes tables of its sizes in front of its first
// data. Their room is there even where they are not filled: ranks with even and with uneven shards
// may be of one call, and must agree on where data begins.
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
        senders_(static_cast<std::size_t>(world_size_)),
        layout_{call.op == OpKind::kAllGather ? ShardLayout::Kind::kToAll
                : is_reduction(call.op)       ? ShardLayout::Kind::kReduced
                                              : ShardLayout::Kind::kToEach,
                rank_, world_size_, (context.phase_bytes() - tables_bytes_) / element_bytes_,
                senders_.data()} {
    layout_.learn(rank_, [&](int to) { return given_to(to).num_elems; });
    for (int from = 0; from < world_size_; ++from) result_elems_ += taken_from(from).num_elems;
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
        if (has_equal_sizes())
          learn_equal_sizes();
        else
          learn_sizes();
        num_phases = layout_.num_phases();
        keep_inputs();
      }
      if (is_reduction(call_.op))
        reduce(piece_idx);
      else
        copy(piece_idx);
      context_.finish_copies();
    }
    std::size_t sent_elems = 0;
    for (int to = 0; to < world_size_; ++to)
      if (to != rank_) sent_elems += given_to(to).num_elems;
    return sent_elems * element_bytes_;
  }

  // Reads and compares the sizes of all ranks, in the first phase. Throws Mismatched.
  void learn_sizes() {
    for (int rank = 0; rank < world_size_; ++rank) {
      headers_.push_back(context_.header_of(rank));
      tables_.push_back(context_.wait(rank));
    }
    for (int from = 0; from < world_size_; ++from)
      for (int to = 0; to < world_size_; ++to)
        if (given(from, to) != expected(from, to)) throw_mismatch(from, to);
    for (int from = 0; from < world_size_; ++from)
      layout_.learn(from, [&](int to) { return given(from, to); });
  }

 private:
  // ---- sizes

  // Of this rank's own buffers.
  CallPart given_to(int to) const {
    return part_given(call_, rank_, to).value_or(CallPart{nullptr, 0});
  }
  CallPart taken_from(int from) const {
    return part_taken(call_, rank_, from).value_or(CallPart{nullptr, 0});
  }

  // Whether no rank has a table, and all have the same size in the header: so has every pair. The
  // other collectives come here with uneven shards only.
  bool has_equal_sizes() {
    if (layout_.kind != ShardLayout::Kind::kToEach) return false;
    for (int rank = 0; rank < world_size_; ++rank) {
      const CallHeader header = context_.header_of(rank);
      if (header.is_uneven || header.num_elems != call_.num_elems) return false;
    }
    return true;
  }

  void learn_equal_sizes() {
    for (int from = 0; from < world_size_; ++from) {
      const bool is_silent = call_.op == OpKind::kScatter && from != call_.root;
      const bool is_to_root = call_.op == OpKind::kGather;
      layout_.learn_even(from, is_to_root ? call_.root : 0,
                         is_silent    ? 0
                         : is_to_root ? call_.root + 1
                                      : world_size_,
                         call_.num_elems);
    }
  }

  const CallHeader& header_of(int rank) const { return headers_[static_cast<std::size_t>(rank)]; }

  // Entry `entry` of the tables of `rank`, or num_elems of its header if it has no tables.
  std::size_t published(int rank, int entry) {
    if (!header_of(rank).is_uneven) return header_of(rank).num_elems;
    std::uint64_t elems = 0;
    std::memcpy(
        &elems,
        tables_[static_cast<std::size_t>(rank)] + static_cast<std::size_t>(entry) * sizeof(elems),
        sizeof(elems));
    return elems;
  }

  bool has_transfer(int from, int to) const {
    return (call_.op != OpKind::kGather || to == call_.root) &&
           (call_.op != OpKind::kScatter || from == call_.root);
  }
  bool is_gathered() const { return call_.op == OpKind::kAllGather || call_.op == OpKind::kGather; }

  // The size that `from` published for `to`.
  std::size_t given(int from, int to) {
    if (!has_transfer(from, to)) return 0;
    return is_gathered() ? header_of(from).num_elems : published(from, to);
  }

  // The size that `to` expects from `from`.
  std::size_t expected(int from, int to) {
    if (!has_transfer(from, to)) return 0;
    if (is_gathered()) return published(to, from);
    return call_.op == OpKind::kAllToAll ? published(to, world_size_ + from)
                                         : header_of(to).num_elems;
  }

  [[noreturn]] void throw_mismatch(int from, int to) {
    const int peer = from == rank_ ? to : from;
    const host::Group& group = context_.group();
    throw Mismatched{
        .peer = peer,
        .theirs = header_of(peer),
        .difference = size_difference(group.group_rank(from), given(from, to) * element_bytes_,
                                      group.group_rank(to), expected(from, to) * element_bytes_)};
  }

  // ---- pieces

  // Copies inputs that would be overwritten.
  void keep_inputs() {
    for (int peer = 0; peer < world_size_ && call_.op == OpKind::kAllToAll; ++peer) {
      if (peer == rank_ || call_.inputs[peer] != call_.outputs[peer]) continue;
      const CallPart part = given_to(peer);
      if (!layout_.overwrites(peer, part.num_elems)) continue;
      const auto* input = static_cast<const std::byte*>(part.data);
      kept_.resize(senders_.size());
      kept_[static_cast<std::size_t>(peer)].assign(input, input + part.num_elems * element_bytes_);
    }
  }

  const void* input(int to) const {
    const auto idx = static_cast<std::size_t>(to);
    return !kept_.empty() && !kept_[idx].empty() ? kept_[idx].data() : given_to(to).data;
  }

  void stage(std::size_t piece_idx) {
    std::byte* region = nullptr;
    if (is_first_) {
      std::byte* table = context_.open();
      region = table + tables_bytes_;
      for (const std::size_t* sizes : {call_.input_elems, call_.output_elems}) {
        if (sizes == nullptr || !context_.header().is_uneven) continue;
        std::memcpy(table, sizes, table_bytes_);
        table += table_bytes_;
      }
    }
    std::size_t offset_elems = 0;
    for (int to = 0; to < world_size_; ++to) {
      if (!layout_.is_staged(rank_, to)) continue;
      const std::size_t shard_elems = given_to(to).num_elems;
      const ElemRange part = layout_.slice(rank_, shard_elems, piece_idx);
      if (part.num_elems > 0) {
        if (region == nullptr) region = context_.open();
        context_.stage(at(region, offset_elems, element_bytes_),
                       at(input(to), part.begin_elems, element_bytes_),
                       part.num_elems * element_bytes_);
      }
      offset_elems += layout_.slice_elems(rank_, shard_elems);
    }
  }

  // The data that `from` has for this rank in this phase.
  const std::byte* received(int from, const ElemRange& part) {
    if (from == rank_) return at(input(rank_), part.begin_elems, element_bytes_);
    return context_.wait(from) + (is_first_ ? tables_bytes_ : 0) +
           senders_[static_cast<std::size_t>(from)].offset_elems * element_bytes_;
  }

  void copy(std::size_t piece_idx) {
    for (int distance = 0; distance < world_size_; ++distance) {
      const int from = (rank_ + distance) % world_size_;
      const CallPart taken = taken_from(from);
      const ElemRange part = layout_.slice(from, taken.num_elems, piece_idx);
      if (part.num_elems > 0)
        context_.copy_result(at(taken.data, part.begin_elems, element_bytes_), received(from, part),
                             part.num_elems * element_bytes_, result_elems_ * element_bytes_);
    }
  }

  void reduce(std::size_t piece_idx) {
    const CallPart taken = taken_from(rank_);
    const ElemRange part = layout_.slice(rank_, taken.num_elems, piece_idx);  // from every rank
    if (part.num_elems == 0) return;
    std::vector<const void*>& sources = context_.sources();
    for (int from = 0; from < world_size_; ++from) sources[from] = received(from, part);
    context_.reduce(call_, at(taken.data, part.begin_elems, element_bytes_), part.num_elems);
  }

  ShmContext& context_;
  const Collective& call_;
  int rank_;
  int world_size_;
  std::size_t element_bytes_;
  std::size_t table_bytes_;                   // of one
  std::size_t tables_bytes_;                  // of the room for all
  std::vector<ShardLayout::Sender> senders_;  // of the layout
  ShardLayout layout_;
  std::size_t result_elems_ = 0;              // of this rank, in all
  std::vector<CallHeader> headers_;           // by rank, as the next: of uneven shards
  std::vector<const std::byte*> tables_;      // where those of the first phase are
  std::vector<std::vector<std::byte>> kept_;  // by rank, if any: see keep_inputs()
  bool is_first_ = true;
};

}  // namespace

std::uint64_t alltoallv(ShmContext& context, const Collective& call) {
  return Alltoallv(context, call).run();
}

void explain_mismatch(ShmContext& context, const Collective& call) {
  Alltoallv(context, call).learn_sizes();
}

// Headers only: no rank leaves before all have arrived.
std::uint64_t barrier(ShmContext& context, const Collective&) {
  static_cast<void>(context.publish());
  return 0;
}

// The root stages a piece while the others copy the one before: half of a phase's maximum.
std::uint64_t broadcast(ShmContext& context, const Collective& call) {
  const std::size_t bytes = element_bytes(call.dtype);
  const bool is_root = context.rank() == call.root;
  context.for_each_piece(
      call.num_elems, context.phase_bytes() / 2 / bytes,
      [&](const ElemRange& piece) {
        if (is_root)
          context.stage(context.open(), at(call.inputs[0], piece.begin_elems, bytes),
                        piece.num_elems * bytes);
      },
      [&](const ElemRange& piece) {
        if (!is_root)
          context.copy_result(at(call.outputs[0], piece.begin_elems, bytes),
                              context.wait(call.root), piece.num_elems * bytes, call.num_bytes());
      });
  return is_root ? context.num_peers() * call.num_bytes() : 0;
}

// Every rank stages its shard; all copy all.
std::uint64_t all_gather(ShmContext& context, const Collective& call) {
  if (context.header().is_uneven) return alltoallv(context, call);
  const std::size_t bytes = element_bytes(call.dtype);
  const std::size_t result_bytes =
      static_cast<std::size_t>(context.world_size()) * call.num_bytes();
  const auto input = [&](const ElemRange& piece) {
    return at(call.inputs[0], piece.begin_elems, bytes);
  };
  context.for_each_piece(
      call.num_elems, context.phase_bytes() / bytes,
      [&](const ElemRange& piece) {
        context.stage(context.open(), input(piece), piece.num_elems * bytes);
      },
      [&](const ElemRange& piece) {
        for (int distance = 0; distance < context.world_size(); ++distance) {
          const int peer = (context.rank() + distance) % context.world_size();
          context.copy_result(at(call.outputs[peer], piece.begin_elems, bytes),
                              distance == 0 ? input(piece) : context.wait(peer),
                              piece.num_elems * bytes, result_bytes);
        }
      });
  return context.num_peers() * call.num_bytes();
}

// Every rank stages a slice of each peer's chunk; each reduces its own from all.
std::uint64_t reduce_scatter(ShmContext& context, const Collective& call) {
  if (context.header().is_uneven) return alltoallv(context, call);
  const int rank = context.rank();
  const int world_size = context.world_size();
  const std::size_t bytes = element_bytes(call.dtype);
  std::vector<const void*>& sources = context.sources();
  // Of the slice for `target` in the region of another rank, which has none for itself; a shared
  // input has one for every rank.
  const auto offset_elems = [&](int target, int of, const ElemRange& piece) {
    const bool is_behind = target > of && !context.is_zero_copy();
    return static_cast<std::size_t>(is_behind ? target - 1 : target) * piece.num_elems;
  };
  context.for_each_piece(
      call.num_elems, context.phase_bytes() / context.num_peers() / bytes,
      [&](const ElemRange& piece) {
        std::byte* region = context.open();
        for (int peer = 0; peer < world_size; ++peer)
          if (peer != rank)
            context.stage(at(region, offset_elems(peer, rank, piece), bytes),
                          at(call.inputs[peer], piece.begin_elems, bytes), piece.num_elems * bytes);
      },
      [&](const ElemRange& piece) {
        for (int peer = 0; peer < world_size; ++peer)
          sources[peer] = peer == rank
                              ? at(call.inputs[rank], piece.begin_elems, bytes)
                              : at(context.wait(peer), offset_elems(rank, peer, piece), bytes);
        context.reduce(call, at(call.outputs[0], piece.begin_elems, bytes), piece.num_elems);
      });
  return context.num_peers() * call.num_bytes();
}

}  // namespace ringcomm
