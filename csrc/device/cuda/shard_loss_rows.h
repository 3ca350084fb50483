#pragma once

#include "device/cuda/loss_rows.h"
#include "device/cuda/part_exchange.h"
#include "device/cuda/shard_loss_call.h"

// cross_entropy_and_grad_ over ranks that have a shard of the classes each, with one read and one
// write of the logits. Cluster c of each rank has rows c, c + num_clusters and so on, so row t of a
// cluster is exchanged with row t of the same cluster of the peers. In turn t it sends its part of
// row t to all peers, then receives their parts of row t - 1 and computes that row's gradient from
// the logits in shared memory. The cluster's first block sends and waits for the whole cluster.
//
// For the use of packets see packet_half(). The number before the rows has the call's header.

namespace ringcomm::cuda {

/// A target that another rank has.
inline constexpr int kElsewhere = -3;

template <class Logits, bool kSmooths, class B, class W>
class ShardLossRows : LossRows<Logits, kSmooths, B> {
  using Base = LossRows<Logits, kSmooths, B>;
  using Base::block_, Base::call_, Base::heading, Base::scale2, Base::kPerVector;

 public:
  RINGCOMM_HD ShardLossRows(B& block, W& waiter, const ShardLossCall& call)
      : Base(block, call.loss),
        waiter_(waiter),
        shard_(call),
        exchange_(waiter, call, block.cluster_idx()),
        first_(block.cluster_idx()),
        step_(block.num_clusters()),
        num_rows_((call.loss.num_tokens - first_ + step_ - 1) / step_) {}

  RINGCOMM_HD void run() {
    if (is_leader()) Claim<W>(waiter_, busy()).check(waiter_, shard_);
    for (unsigned i = block_.thread_idx(); i < 2 * kMaxClusterBlocks; i += block_.num_threads())
      heading().of_blocks[i / kMaxClusterBlocks][i % kMaxClusterBlocks] = no_part();
    block_.start();
    std::int64_t before = call_.ignore_index, now = this->target(row(0));
    std::int64_t next = this->target(row(1)), after = this->target(row(2));
    load(0, now);
    load(1, next);
    this->scale_ = static_cast<float>(call_.logit_scale / this->find_denominator());
    bool goes_on = open();
    if (kSmooths)
      this->smooth_ = call_.label_smoothing / static_cast<float>(call_.vocab_size) * this->scale_;
    for (std::int64_t turn = 0; goes_on && turn <= num_rows_; ++turn) {
      const std::int64_t later = this->target(row(turn + 3));
      LossPart own = no_part();
      if (turn < num_rows_) own = begin(turn, now);
      if (turn > 0)
        goes_on = end(turn - 1, before);
      else
        block_.sync();  // the next row's warps write where this one's were read
      own_ = own;
      if (goes_on) load(turn + 2, after);
      before = now, now = next, next = after, after = later;
    }
    await_loads(num_loads_);
    block_.drain_stores();
    if (!is_leader()) return;
    if (goes_on) close();
    exchange_.end(last_number(), stop_);
    finish(waiter_, shard_, stop_);
    Claim<W>::end(waiter_, busy());
  }

 private:
  RINGCOMM_HD bool is_leader() const { return block_.cluster_rank() == 0; }
  RINGCOMM_HD std::uint32_t& busy() const {
    return shard_.staging.busy(shard_.rank, block_.cluster_idx());
  }
  RINGCOMM_HD std::int64_t row(std::int64_t turn) const { return first_ + turn * step_; }
  RINGCOMM_HD std::uint64_t last_number() const {
    return static_cast<std::uint64_t>(num_rows_) + 2;
  }
  RINGCOMM_HD static unsigned slot_of(std::int64_t turn) {
    return static_cast<unsigned>(turn) % kMaxRowSlots;
  }

  /// The column in this rank's logits, or one of the special target columns.
  RINGCOMM_HD int local_column(std::int64_t target) const {
    if (target == call_.ignore_index) return kIgnoredTarget;
    if (target < 0 || target >= call_.vocab_size) return kNoClass;
    const std::int64_t column = target - shard_.vocab_start;
    return column >= 0 && column < call_.num_classes ? static_cast<int>(column) : kElsewhere;
  }

  RINGCOMM_HD void load(std::int64_t turn, std::int64_t target) {
    if (turn >= num_rows_) return;
    Base::load(row(turn), slot_of(turn), local_column(target));
    ++num_loads_;
  }
  /// Waits until `num` loads are complete: a block must not end before its loads.
  RINGCOMM_HD void await_loads(std::int64_t num) {
    for (; num_awaited_ < num; ++num_awaited_)
      block_.await_load(slot_of(num_awaited_),
                        static_cast<unsigned>(num_awaited_ / kMaxRowSlots % 2));
  }

  // ---- before and after the rows

  /// Whether all ranks made this call, which is known before anything is stored. Shards that do
  /// not fit together make all gradients and losses NaN.
  RINGCOMM_HD bool open() {
    if (is_leader()) {
      exchange_.put_header();
      const LossPart own = {0, 0, static_cast<float>(call_.num_classes), shard_.way};
      exchange_.put(1, own);
      stop_ = exchange_.compare_headers();
      if (stop_ == Stop::kNone) stop_ = exchange_.take(1, own, heading().of_ranks);
    }
    const LossPart all = told_by_leader(0, [&] {
      LossPart sum = {0, 1, 0, 0};
      RINGCOMM_ROLLED
      for (int rank = 0; rank < shard_.world_size; ++rank) {
        sum.total += heading().of_ranks[rank].total;
        sum.target += heading().of_ranks[rank].target;
      }
      const bool fits =
          sum.total == static_cast<float>(call_.vocab_size) && sum.target == shard_.whole_way;
      if (!fits) sum.sum = std::numeric_limits<float>::quiet_NaN();
      return sum;
    });
    this->scale_ *= all.sum;
    return all.max == all.max;
  }

  RINGCOMM_HD void close() {
    exchange_.put(last_number(), no_part());
    stop_ = exchange_.take(last_number(), no_part(), heading().of_ranks);
  }

  /// Sends the first block's result from the ranks' parts to all blocks; after a stop, with a
  /// maximum of NaN, which no row has. `idx` counts these results.
  template <class Make>
  RINGCOMM_HD LossPart told_by_leader(std::int64_t idx, const Make& make) {
    const auto place = static_cast<unsigned>(idx % 2), turn = static_cast<unsigned>(idx / 2 % 2);
    LossPart& result = heading().of_all_ranks[place];
    if (is_leader()) {
      for (unsigned peer = block_.thread_idx(); peer < block_.cluster_blocks();
           peer += block_.num_threads()) {
        LossPart made = no_part();
        if (stop_ == Stop::kNone)
          made = make();
        else
          made.max = std::numeric_limits<float>::quiet_NaN();
        block_.send(peer, 2 + place, result, made);
      }
    }
    block_.await_parts(2 + place, turn, 1);
    return result;
  }

  // ---- a row

  /// This rank's part of a row, which the first block sends to the peers.
  RINGCOMM_HD LossPart begin(std::int64_t turn, std::int64_t target) {
    const int column = local_column(target);
    const LossSegment segment = this->segment_of(row(turn));
    await_loads(turn + 1);
    LossPart own = no_part();
    if (column != kIgnoredTarget) own = part_of(slot_of(turn), segment, column);
    const LossPart whole = part_of_cluster(turn, own);
    if (is_leader()) exchange_.put(static_cast<std::uint64_t>(turn) + 2, whole);
    return whole;
  }

  /// The part of a warp's logits.
  RINGCOMM_HD LossPart part_of(unsigned slot, const LossSegment& segment, int target) const {
    this->visit_partial(segment, call_.num_classes, [&](int column, int i) {
      if (column < 0 || column >= call_.num_classes)
        this->put_element(slot, i, Logits::rounded(-std::numeric_limits<float>::infinity()));
    });
    const Vector* const vectors = this->slot_at(slot);
    float most = kLowestLogit;
    for_vectors(segment, [&](unsigned v) { most = fmaxf(most, Logits::largest(vectors[v])); });
    most = block_.warp_max(most);
    float sum = 0, total = 0;
    for_vectors(segment, [&](unsigned v) {
      const Vector vector = vectors[v];
      float of_vector = 0, total_of_vector = 0;
      RINGCOMM_UNROLL
      for (int i = 0; i < kPerVector; ++i) {
        const float x = Logits::get(vector, i);
        const auto column =
            static_cast<unsigned>(segment.column) + v * kPerVector + static_cast<unsigned>(i);
        if (kSmooths && column < static_cast<unsigned>(call_.num_classes)) total_of_vector += x;
        of_vector += power_of_2((x - most) * scale2());
      }
      sum += of_vector;
      total += total_of_vector;
    });
    const int offset = target - segment.column;
    const bool is_here = is_mine(segment, target);
    const float x = is_here ? Logits::widened(this->element_at(slot, offset)) : 0.0F;
    return {.max = most,
            .sum = block_.warp_sum(sum),
            .total = kSmooths ? block_.warp_sum(total) : 0.0F,
            .target = block_.warp_sum(x)};
  }

  /// Calls visit(v) for each of this thread's vectors, with four loads in flight.
  template <class Visit>
  RINGCOMM_HD void for_vectors(const LossSegment& segment, const Visit& visit) const {
    RINGCOMM_UNROLL_BY_4
    for (unsigned v = block_.thread_idx(); v < segment.num_vectors; v += block_.num_threads())
      visit(v);
  }

  RINGCOMM_HD bool is_mine(const LossSegment& segment, int target) const {
    const int offset = target - segment.column;
    const unsigned vector = static_cast<unsigned>(offset) / unsigned{kPerVector};
    return target >= 0 && offset >= 0 && vector < segment.num_vectors &&
           vector % block_.num_threads() == block_.thread_idx();
  }

  /// The part of all blocks, returned in the first block only.
  RINGCOMM_HD LossPart part_of_cluster(std::int64_t turn, const LossPart& own) {
    const auto place = static_cast<unsigned>(turn % 2),
               parity = static_cast<unsigned>(turn / 2 % 2);
    LossHeading& shared = heading();
    LossPart(&parts)[kMaxClusterBlocks] = shared.of_blocks[place];
    if (this->lane() == 0) shared.of_warps[this->warp()] = own;
    block_.sync();
    if (this->warp() == 0) {
      LossPart part = no_part();
      for (unsigned i = this->lane(); i < this->num_warps(); i += B::kWarpThreads)
        part = added(part, shared.of_warps[i]);
      const float most = block_.warp_max(part.max);
      part.sum = block_.warp_sum(part.sum * power_of_2((part.max - most) * scale2()));
      if (kSmooths) part.total = block_.warp_sum(part.total);
      part.target = block_.warp_sum(part.target);
      part.max = most;
      if (this->lane() == 0) block_.send(0, place, parts[block_.cluster_rank()], part);
    }
    if (!is_leader()) return no_part();
    block_.await_parts(place, parity, block_.cluster_blocks());
    return sum_of(parts, kMaxClusterBlocks);
  }

  RINGCOMM_HD LossPart added(const LossPart& a, const LossPart& b) const {
    LossPart both = this->merged(a, b);
    both.target = a.target + b.target;
    return both;
  }
  /// Adds from the first to the last, so that the same parts always give the same bits.
  RINGCOMM_HD LossPart sum_of(const LossPart* parts, int num_parts) const {
    LossPart whole = no_part();
    RINGCOMM_ROLLED
    for (int i = 0; i < num_parts; ++i) whole.max = fmaxf(whole.max, parts[i].max);
    RINGCOMM_ROLLED
    for (int i = 0; i < num_parts; ++i) {
      const float power = power_of_2((parts[i].max - whole.max) * scale2());
      whole.sum = multiply_add(parts[i].sum, power, whole.sum);
      if (kSmooths) whole.total += parts[i].total;
      whole.target += parts[i].target;
    }
    return whole;
  }

  /// Computes the gradient of a row whose logits are in its slot. False if the peers did not
  /// arrive.
  RINGCOMM_HD bool end(std::int64_t turn, std::int64_t target) {
    if (is_leader())
      stop_ = exchange_.take(static_cast<std::uint64_t>(turn) + 2, own_, heading().of_ranks);
    const LossPart whole =
        told_by_leader(turn + 1, [&] { return sum_of(heading().of_ranks, shard_.world_size); });
    if (whole.max != whole.max) return false;
    const LossSegment segment = this->segment_of(row(turn));
    const int column = local_column(target);
    if (column == kIgnoredTarget)
      this->write_zeros(row(turn), slot_of(turn), segment);
    else
      differentiate(row(turn), target, column, slot_of(turn), segment, whole);
    block_.seal();
    this->store(slot_of(turn), segment);
    return true;
  }

  RINGCOMM_HD void differentiate(std::int64_t row, std::int64_t target, int column, unsigned slot,
                                 const LossSegment& segment, const LossPart& whole) {
    float weight = 1;
    if (call_.class_weights != nullptr && column != kNoClass)
      weight = load_constant(call_.class_weights + target);
    const float target_weight = (1.0F - call_.label_smoothing) * weight;
    const float scale = column == kNoClass ? std::numeric_limits<float>::quiet_NaN() : this->scale_;
    float prob = target_weight + call_.label_smoothing;
    if (call_.z_loss != 0) prob = multiply_add(2.0F * call_.z_loss, this->lse_of(whole), prob);
    const LossFactors factors = {.prob = quotient(prob * scale, whole.sum),
                                 .smooth = this->smooth_,
                                 .target = target_weight * scale};
    const int offset = column - segment.column;
    const bool is_here = is_mine(segment, column);
    const float x = is_here ? Logits::widened(this->element_at(slot, offset)) : 0.0F;
    write_gradient(slot, segment, whole.max, factors);
    if (is_here) {
      const float power = power_of_2((x - whole.max) * scale2());
      const float others = multiply_add(power, factors.prob, -factors.smooth);
      this->put_element(slot, offset, Logits::rounded(others - factors.target));
    }
    if (this->is_first_thread()) {
      // A scale of NaN: the shards do not fit together, or the target is no class.
      const float loss = this->loss_of(whole.target, whole, target_weight);
      this->put_values(row, scale == scale ? loss : scale, this->lse_of(whole));
    }
    this->visit_partial(segment, call_.num_classes, [&](int at, int i) {
      if (at >= call_.num_classes) this->put_element(slot, i, Logits::rounded(0));
    });
    this->store_edges(row, slot, segment);
  }

  RINGCOMM_HD void write_gradient(unsigned slot, const LossSegment& segment, float most,
                                  const LossFactors& factors) const {
    Vector* const vectors = this->slot_at(slot);
    for_vectors(segment, [&](unsigned v) {
      const Vector vector = vectors[v];
      float elements[kPerVector];
      RINGCOMM_UNROLL
      for (int i = 0; i < kPerVector; ++i)
        elements[i] = multiply_add(power_of_2((Logits::get(vector, i) - most) * scale2()),
                                   factors.prob, -factors.smooth);
      vectors[v] = Logits::vector_of(elements);
    });
  }

  W& waiter_;
  const ShardLossCall& shard_;
  PartExchange<W> exchange_;
  std::int64_t first_, step_, num_rows_;
  std::int64_t num_loads_ = 0, num_awaited_ = 0;
  Stop stop_ = Stop::kNone;   ///< why the first block stops
  LossPart own_ = no_part();  ///< of the row that is to be ended, in the first block
};

/// The kernel of a type of logits. kSmooths: there is label smoothing.
template <class Logits, bool kSmooths, class B, class W>
RINGCOMM_HD void shard_loss_rows(B& block, W& waiter, const ShardLossCall& call) {
  static_assert(RowBlock<B> && Block<W>);
  ShardLossRows<Logits, kSmooths, B, W>(block, waiter, call).run();
}

}  // namespace ringcomm::cuda
