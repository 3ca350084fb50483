#include <algorithm>
#include <vector>

#include "collectives/collective.h"
#include "collectives/shm/algorithms.h"
#include "collectives/shm/phase.h"
#include "collectives/shm/share_sizes.h"
#include "core/chunk_layout.h"

namespace ringcomm {
namespace {

// A rank's smallest shares move in one piece, up to this part of a region in all.
constexpr std::size_t kSmallPart = 16;

// One call: the addresses of its shares in this rank's buffers and, piece by piece, in the regions.
class ShareExchange {
 public:
  ShareExchange(Engine& engine, const Collective& call, const CallHeader& header)
      : engine_(engine),
        call_(call),
        rank_(engine.rank()),
        world_size_(engine.world_size()),
        element_bytes_(element_bytes(call.dtype)),
        sizes_(engine, call, header),
        room_elems_(sizes_.phase_bytes() / element_bytes_),
        small_elems_(std::max<std::size_t>(1, room_elems_ / kSmallPart / num_targets())),
        num_pieces_(static_cast<std::size_t>(world_size_)) {
    for (int from = 0; from < world_size_; ++from) count_pieces(from);
    // All ranks' rows are equal, and a piece must be the same part of each source.
    if (is_reduction(call.op))
      std::ranges::fill(num_pieces_, std::size_t{*std::ranges::max_element(num_pieces_)});
  }

  /// Runs the phases. `receive(piece_idx)` is called in each, when this rank's part is published.
  template <class Receive>
  std::uint64_t run(const Receive& receive) {
    std::size_t num_pieces = 1;  // until the sizes are known; then equal on all ranks
    for (std::size_t piece_idx = 0; piece_idx < num_pieces; ++piece_idx) {
      is_first_ = piece_idx == 0;
      stage(piece_idx);
      engine_.publish();
      if (is_first_) {
        sizes_.exchange();
        for (int from = 0; from < world_size_ && !is_reduction(call_.op); ++from)
          count_pieces(from);
        num_pieces = *std::ranges::max_element(num_pieces_);
        keep_own_share();
      }
      receive(piece_idx);
    }
    return sent_bytes();
  }

  /// The data that `from` has staged for this rank in this phase.
  const std::byte* received(int from, std::size_t piece_idx) const {
    const std::byte* data = is_first_ ? sizes_.first_data(from) : engine_.wait(from);
    return data + offset_elems(from, rank_, piece_idx) * element_bytes_;
  }

  /// The part of the share from `from` to `to` that belongs to piece `piece_idx`.
  ElemRange slice(int from, int to, std::size_t piece_idx) const {
    const std::size_t elems = sizes_.elems(from, to);
    return slice_of({0, elems}, piece_idx, slice_elems(from, elems));
  }

  /// Copies what the peers have for this rank to the outputs.
  void copy_received(std::size_t piece_idx) const {
    for (int distance = 1; distance < world_size_; ++distance) {
      const int from = (rank_ + distance) % world_size_;
      const ElemRange elems = slice(from, rank_, piece_idx);
      if (elems.num_elems == 0) continue;
      engine_.copy_result(at(output(from), elems.begin_elems, element_bytes_),
                          received(from, piece_idx), elems.num_elems * element_bytes_,
                          result_bytes());
    }
  }

 private:
  // All peers read the same of an all_gather's region.
  bool is_multicast() const { return call_.op == OpKind::kAllGather; }
  std::size_t num_targets() const {
    const bool is_shared = !is_multicast() && call_.op != OpKind::kGather;
    return is_shared ? static_cast<std::size_t>(world_size_ - 1) : 1;
  }

  const void* input(int to) const {
    const bool has_one = call_.op == OpKind::kAllGather || call_.op == OpKind::kGather;
    return call_.inputs[has_one ? 0 : to];
  }
  void* output(int from) const {
    const bool has_one = call_.op == OpKind::kScatter || call_.op == OpKind::kReduceScatter;
    return call_.outputs[has_one ? 0 : from];
  }

  // The size of a slice of a share of `from`: in proportion to the share, so that all end together.
  std::size_t slice_elems(int from, std::size_t elems) const {
    if (elems <= small_elems_) return elems;
    return std::max(small_elems_, num_slices(elems, num_pieces_[static_cast<std::size_t>(from)]));
  }

  // Sets the number of pieces of `from`, so that the slices of each fit into its region. A rank
  // does so for itself before it knows the others' sizes.
  void count_pieces(int from) {
    // Until then, the others' sizes in a reduction are this rank's.
    const int row = is_first_ && is_reduction(call_.op) ? rank_ : from;
    const auto sum = [&](const auto& size_of) {
      std::size_t elems = 0;
      for (int to = 0; to < world_size_; ++to)
        if (to != from) {
          const std::size_t size = size_of(sizes_.elems(row, to));
          elems = is_multicast() ? size : elems + size;
        }
      return elems;
    };
    std::size_t& num_pieces = num_pieces_[static_cast<std::size_t>(from)];
    num_pieces = std::max<std::size_t>(
        1, num_slices(sum([](std::size_t elems) { return elems; }), room_elems_));
    while (sum([&](std::size_t elems) { return slice_elems(from, elems); }) > room_elems_)
      num_pieces += num_pieces / 64 + 1;
  }

  // The slices of a region are contiguous, so that small ones share cache lines.
  std::size_t offset_elems(int from, int to, std::size_t piece_idx) const {
    std::size_t elems = 0;
    if (is_multicast()) return elems;
    for (int other = 0; other < to; ++other)
      if (other != from) elems += slice(from, other, piece_idx).num_elems;
    return elems;
  }

  void stage(std::size_t piece_idx) {
    std::byte* region = nullptr;
    if (is_first_) region = sizes_.open_first();
    bool is_staged = false;
    for (int to = 0; to < world_size_; ++to) {
      if (to == rank_ || (is_multicast() && is_staged)) continue;
      const ElemRange elems = slice(rank_, to, piece_idx);
      if (elems.num_elems == 0) continue;
      if (region == nullptr) region = engine_.open();
      const std::size_t num_bytes = elems.num_elems * element_bytes_;
      engine_.stage(region, at(input(to), elems.begin_elems, element_bytes_), num_bytes);
      region += num_bytes;
      is_staged = true;
    }
  }

  void keep_own_share() const {
    const std::size_t num_bytes = sizes_.elems(rank_, rank_) * element_bytes_;
    if (num_bytes == 0 || is_reduction(call_.op)) return;
    engine_.copy_result(output(rank_), input(rank_), num_bytes, result_bytes());
  }

  std::size_t result_bytes() const {
    std::size_t elems = 0;
    for (int from = 0; from < world_size_; ++from) elems += sizes_.elems(from, rank_);
    return elems * element_bytes_;
  }

  std::uint64_t sent_bytes() const {
    std::size_t elems = 0;
    for (int to = 0; to < world_size_; ++to)
      if (to != rank_) elems += sizes_.elems(rank_, to);
    return elems * element_bytes_;
  }

  Engine& engine_;
  const Collective& call_;
  int rank_;
  int world_size_;
  std::size_t element_bytes_;
  ShareSizes sizes_;
  std::size_t room_elems_;   // of a region
  std::size_t small_elems_;  // of a share that one piece holds, whatever the others' sizes
  std::vector<std::size_t> num_pieces_;  // by rank: of what it sends
  bool is_first_ = true;
};

std::uint64_t move_shares(Engine& engine, const Collective& call, const CallHeader& header) {
  ShareExchange exchange(engine, call, header);
  return exchange.run([&](std::size_t piece_idx) { exchange.copy_received(piece_idx); });
}

}  // namespace

std::uint64_t gather(Engine& engine, const Collective& call, const CallHeader& header) {
  return move_shares(engine, call, header);
}

std::uint64_t scatter(Engine& engine, const Collective& call, const CallHeader& header) {
  return move_shares(engine, call, header);
}

std::uint64_t all_to_all(Engine& engine, const Collective& call, const CallHeader& header) {
  return move_shares(engine, call, header);
}

std::uint64_t all_gather_uneven(Engine& engine, const Collective& call, const CallHeader& header) {
  return move_shares(engine, call, header);
}

std::uint64_t reduce_scatter_uneven(Engine& engine, const Collective& call,
                                    const CallHeader& header) {
  const int rank = engine.rank();
  const std::size_t bytes = element_bytes(call.dtype);
  const ReduceOp& op = reduce_op_of(call);
  std::vector<const void*> sources(static_cast<std::size_t>(engine.world_size()));
  ShareExchange exchange(engine, call, header);
  return exchange.run([&](std::size_t piece_idx) {
    // The same from every rank: they have been compared.
    const ElemRange elems = exchange.slice(rank, rank, piece_idx);
    if (elems.num_elems == 0) return;
    for (int peer = 0; peer < engine.world_size(); ++peer)
      sources[static_cast<std::size_t>(peer)] =
          peer == rank ? at(call.inputs[rank], elems.begin_elems, bytes)
                       : exchange.received(peer, piece_idx);
    op.combine(at(call.outputs[0], elems.begin_elems, bytes), nullptr, sources.data(),
               engine.world_size(), elems.num_elems, divisor_of(call, engine.world_size()));
  });
}

void explain_mismatch(Engine& engine, const Collective& call, const CallHeader& header) {
  ShareSizes(engine, call, header).exchange();
}

}  // namespace ringcomm
