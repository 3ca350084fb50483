#pragma once

// One collective on one rank, with inputs that every rank can compute for all, the oracle's result,
// and guards around every buffer.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "communicator/communicator.h"
#include "core/arch.h"
#include "host/group.h"
#include "kernels/common/types.h"
#include "operator_case.h"
#include "reduce_oracle.h"
#include "thread_ranks.h"

namespace ringcomm::testing {

/// Bytes of data in one phase of a board: a region without its cursor.
inline constexpr std::size_t kPhaseBytes =
    host::SegmentConfig{}.board_region_bytes - sizeof(Cursor);
/// Bytes of one slot of a ring in shared memory.
inline constexpr std::size_t kRingSlotBytes = host::SegmentConfig{}.ring_slot_bytes;

struct Case {
  OpKind op = OpKind::kAllReduce;
  DType dtype = DType::kFloat32;
  Reduction reduction = Reduction::kSum;
  Algorithm algorithm = Algorithm::kAuto;
  int root = -1;
  std::size_t num_elems = 0;
  bool is_in_place = false;
  bool is_random = false;  ///< floats of any size, where small integers make results exact else
  std::uint32_t salt = 0;  ///< other data in every call
  bool is_uneven = false;  ///< shards of 0 to 2 num_elems
  std::function<std::size_t(int from, int to)> elems_of = {};  ///< instead, of uneven shards

  std::string to_text() const {
    std::ostringstream text;
    text << name_of(op) << ' ' << name_of(dtype) << ' ' << name_of(reduction) << ' '
         << name_of(algorithm) << " root " << root << ", " << num_elems << " elements"
         << (is_in_place ? " in place" : "") << (is_uneven ? " uneven" : "") << ", salt " << salt;
    return text.str();
  }
};

inline bool rooted(OpKind op) {
  return op == OpKind::kReduce || op == OpKind::kBroadcast || op == OpKind::kGather ||
         op == OpKind::kScatter;
}

inline bool reduces(OpKind op) {
  return op == OpKind::kAllReduce || op == OpKind::kReduce || op == OpKind::kReduceScatter;
}

inline std::uint32_t mixed(std::uint32_t value) {
  value = (value ^ (value >> 16)) * 0x7feb352dU;
  value = (value ^ (value >> 15)) * 0x846ca68bU;
  return value ^ (value >> 16);
}

template <class T>
void append(oracle::Bytes& bytes, T value) {
  const auto* begin = reinterpret_cast<const unsigned char*>(&value);
  bytes.insert(bytes.end(), begin, begin + sizeof(value));
}

inline void append_float(oracle::Bytes& bytes, DType dtype, float value) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return append(bytes, oracle::format_of(dtype).encode(value));
    case DType::kFloat64:
      return append(bytes, static_cast<double>(value));
    default:
      return append(bytes, value);
  }
}

/// Small enough that no result of 8 ranks is rounded, even in bfloat16.
inline void append_integer(oracle::Bytes& bytes, DType dtype, int value) {
  if (oracle::is_float(dtype)) return append_float(bytes, dtype, static_cast<float>(value));
  if (dtype == DType::kBool) value &= 1;
  const auto wide = static_cast<std::int64_t>(value);  // its first bytes are those of any integer
  const auto* begin = reinterpret_cast<const unsigned char*>(&wide);
  bytes.insert(bytes.end(), begin, begin + element_bytes(dtype));
}

/// The elements that rank `from` has for rank `to`.
inline std::size_t shard_elems(const Case& c, int from, int to) {
  if (!c.is_uneven) return c.num_elems;
  const bool is_of_source = c.op == OpKind::kAllGather || c.op == OpKind::kGather;
  const bool is_of_target = c.op == OpKind::kReduceScatter || c.op == OpKind::kScatter;
  // In place, two ranks have as much for each other.
  if (c.op == OpKind::kAllToAll && c.is_in_place && from > to) std::swap(from, to);
  if (c.elems_of) return c.elems_of(is_of_target ? 0 : from, is_of_source ? 0 : to);
  const auto key = static_cast<std::uint32_t>(is_of_source   ? from
                                              : is_of_target ? to
                                                             : from * 64 + to);
  const std::uint32_t random = mixed(c.salt * 8191U + key + 1U);
  return random % 4 == 0 ? 0 : random / 4 % (2 * c.num_elems + 1);
}

/// The input of `rank` for rank `shard`, if its shards differ.
inline oracle::Bytes input_of(const Case& c, int rank, int shard) {
  oracle::Bytes bytes;
  const std::size_t num_elems = shard_elems(c, rank, shard);
  bytes.reserve(num_elems * element_bytes(c.dtype));
  const auto seed = mixed(c.salt * 4096U + static_cast<std::uint32_t>(rank) * 64U +
                          static_cast<std::uint32_t>(shard) + 1U);
  std::mt19937 random(seed);
  for (std::size_t i = 0; i < num_elems; ++i) {
    if (c.dtype == DType::kSoftmaxStats) {
      append(bytes, oracle::exact_stats(mixed(seed + static_cast<std::uint32_t>(i))));
      continue;
    }
    if (c.is_random) {
      append_float(
          bytes, c.dtype,
          std::ldexp(static_cast<float>(random()) / 4e9F - 0.5F, static_cast<int>(random() % 14U)));
      continue;
    }
    const auto value = static_cast<int>(mixed(seed + static_cast<std::uint32_t>(i)) % 7U);
    append_integer(bytes, c.dtype, c.reduction == Reduction::kProduct ? 1 + value % 2 : value - 3);
  }
  return bytes;
}

/// The oracle's result of shard `shard` over all ranks.
inline oracle::Bytes reduced(const Case& c, int world_size, int shard) {
  std::vector<oracle::Bytes> inputs;
  for (int rank = 0; rank < world_size; ++rank) inputs.push_back(input_of(c, rank, shard));
  return oracle::reduce(c.reduction, c.dtype, inputs, shard_elems(c, 0, shard),
                        c.reduction == Reduction::kAvg ? world_size : 1);
}

/// The buffers of one rank's call.
class CaseBuffers {
 public:
  CaseBuffers(const Case& c, int rank, int world_size)
      : case_(c), rank_(rank), world_size_(world_size) {
    // An element off the alignment of vectors, in every second call.
    const std::size_t offset_bytes = c.salt % 2 == 0 ? 0 : element_bytes(c.dtype);
    for (int shard = 0; shard < num_inputs(); ++shard) {
      const oracle::Bytes content = input_of(c, rank, shard);
      inputs_.emplace_back(content.size(), offset_bytes);
      inputs_.back().fill(content);
      input_pointers_.push_back(inputs_.back().data());
      input_elems_.push_back(shard_elems(c, rank, shard));
    }
    for (int shard = 0; shard < num_outputs(); ++shard) {
      const int from = num_outputs() == 1 ? rank : shard;
      const std::size_t num_elems = shard_elems(c, from, rank);
      outputs_.emplace_back(num_elems * element_bytes(c.dtype), offset_bytes);
      const int input = input_below(shard);
      output_pointers_.push_back(input >= 0 ? inputs_[static_cast<std::size_t>(input)].data()
                                            : outputs_.back().data());
      output_elems_.push_back(num_elems);
    }
  }
  CaseBuffers(const CaseBuffers&) = delete;
  CaseBuffers& operator=(const CaseBuffers&) = delete;

  Collective call() const {
    const bool has_input_sizes = case_.is_uneven && num_inputs() == world_size_;
    const bool has_output_sizes = case_.is_uneven && num_outputs() == world_size_;
    const bool has_both = case_.op == OpKind::kAllToAll && case_.is_uneven;
    return Collective{{.num_elems = has_both ? 0 : shard_elems(case_, rank_, rank_),
                       .root = case_.root,
                       .op = case_.op,
                       .dtype = case_.dtype,
                       .reduction = case_.reduction,
                       .algorithm = case_.algorithm},
                      input_pointers_.data(),
                      output_pointers_.data(),
                      has_input_sizes ? input_elems_.data() : nullptr,
                      has_output_sizes ? output_elems_.data() : nullptr};
  }

  /// The content of the call's output, or of its first one.
  oracle::Bytes result() const { return output(0).content(); }

  /// What a caller may do as soon as the call has ended.
  void overwrite() {
    for (std::vector<Guarded>* buffers : {&inputs_, &outputs_})
      for (Guarded& buffer : *buffers) buffer.overwrite();
  }

  /// Throws unless every buffer holds what it must after the call.
  void check() const {
    const std::string where = case_.to_text();
    for (int shard = 0; shard < num_outputs(); ++shard) {
      if (input_below(shard) >= 0 || is_written())
        expect(output(shard).holds(expected(shard)), "the oracle's result of " + where);
      else
        expect(output(shard).is_untouched(), "an untouched output of " + where);
      expect(output(shard).is_guarded(), "untouched guards around the output of " + where);
    }
    for (int shard = 0; shard < num_inputs(); ++shard) {
      bool is_output = false;
      for (int other = 0; other < num_outputs(); ++other)
        is_output = is_output || input_below(other) == shard;
      if (is_output) continue;
      const Guarded& input = inputs_[static_cast<std::size_t>(shard)];
      expect(input.holds(input_of(case_, rank_, shard)), "an unchanged input of " + where);
      expect(input.is_guarded(), "untouched guards around the input of " + where);
    }
  }

 private:
  int num_inputs() const {
    if (case_.op == OpKind::kReduceScatter || case_.op == OpKind::kAllToAll) return world_size_;
    if (case_.op == OpKind::kScatter) return rank_ == case_.root ? world_size_ : 0;
    return 1;
  }
  int num_outputs() const {
    if (case_.op == OpKind::kAllGather || case_.op == OpKind::kAllToAll) return world_size_;
    if (case_.op == OpKind::kGather) return rank_ == case_.root ? world_size_ : 0;
    return 1;
  }
  // The input that is also output `shard`, or -1.
  int input_below(int shard) const {
    if (!case_.is_in_place || num_inputs() == 0) return -1;
    if (case_.op == OpKind::kAllToAll) return shard;
    if (num_outputs() > 1 && shard != rank_) return -1;
    return num_inputs() == 1 ? 0 : rank_;
  }
  const Guarded& output(int shard) const {
    const int input = input_below(shard);
    return input >= 0 ? inputs_[static_cast<std::size_t>(input)]
                      : outputs_[static_cast<std::size_t>(shard)];
  }
  // Whether this rank's outputs are written: a group of one copies.
  bool is_written() const {
    if (world_size_ == 1) return true;
    if (case_.op == OpKind::kReduce) return rank_ == case_.root;
    return case_.op != OpKind::kBroadcast || rank_ != case_.root;
  }
  oracle::Bytes expected(int shard) const {
    if (world_size_ == 1) return input_of(case_, 0, 0);
    switch (case_.op) {
      case OpKind::kAllGather:
      case OpKind::kGather:
        return input_of(case_, shard, 0);
      case OpKind::kAllToAll:
        return input_of(case_, shard, rank_);
      case OpKind::kScatter:
        return input_of(case_, case_.root, rank_);
      case OpKind::kBroadcast:
        return input_of(case_, case_.root, 0);
      case OpKind::kReduceScatter:
        return reduced(case_, world_size_, rank_);
      case OpKind::kReduce:
        return rank_ == case_.root ? reduced(case_, world_size_, 0) : input_of(case_, rank_, 0);
      default:
        return reduced(case_, world_size_, 0);
    }
  }

  Case case_;
  int rank_;
  int world_size_;
  std::vector<Guarded> inputs_, outputs_;
  std::vector<const void*> input_pointers_;
  std::vector<void*> output_pointers_;
  std::vector<std::size_t> input_elems_, output_elems_;
};

/// Runs and checks one case on one rank.
inline void run_case(Communicator& communicator, const Case& c,
                     const WaitLimits& limits = kPatient) {
  CaseBuffers buffers(c, communicator.rank(), communicator.world_size());
  communicator.run(buffers.call(), limits);
  buffers.check();
}

inline const std::vector<OpKind> kAllOps = {
    OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter, OpKind::kAllGather,
    OpKind::kBroadcast, OpKind::kGather, OpKind::kScatter,       OpKind::kAllToAll};
/// The algorithms of all_reduce that every transport supports.
inline const std::vector<Algorithm> kAlgorithms = {Algorithm::kOneShot, Algorithm::kTwoShot,
                                                   Algorithm::kRing};

/// All values of an enum, whose last is `num - 1`.
template <class T>
std::vector<T> all_of(int num) {
  std::vector<T> values;
  for (int value = 0; value < num; ++value) values.push_back(static_cast<T>(value));
  return values;
}

/// The cases of all that it lists, each with each; other data, and another root, in every case.
struct CaseTable {
  std::vector<std::size_t> counts;
  std::vector<OpKind> ops = kAllOps;
  std::vector<Algorithm> algorithms = {Algorithm::kAuto};  ///< of all_reduce
  std::vector<DType> dtypes = {DType::kFloat32};
  std::vector<Reduction> reductions = {Reduction::kSum};  ///< of dtypes that have them
  std::vector<bool> in_place = {false, true};             ///< none: a third of the cases
  std::vector<bool> uneven = {false};                     ///< true of ops that have shards only
  bool is_random = false;
  int root = -1;  ///< instead

  std::vector<Case> of(int world_size) const {
    std::vector<Case> cases;
    for (const OpKind op : ops)
      for (const Algorithm algorithm : algorithms)
        for (const DType dtype : dtypes)
          for (const Reduction reduction : reductions)
            for (const bool is_uneven : uneven)
              for (const bool is_in_place : in_place.empty() ? std::vector{false} : in_place)
                for (const std::size_t num_elems : counts) {
                  if (reduces(op) ? !oracle::has_meaning(reduction, dtype)
                                  : reduction != reductions.front())
                    continue;
                  if (op != OpKind::kAllReduce && algorithm != algorithms.front()) continue;
                  if (is_uneven && !has_shards(op)) continue;
                  const std::uint32_t salt =
                      mixed(static_cast<std::uint32_t>(cases.size()) + 1) >> 8;
                  cases.push_back(
                      {.op = op,
                       .dtype = dtype,
                       .reduction = reduction,
                       .algorithm = op == OpKind::kAllReduce ? algorithm : Algorithm::kAuto,
                       .root = !rooted(op) ? -1
                               : root >= 0
                                   ? root
                                   : static_cast<int>(salt % static_cast<unsigned>(world_size)),
                       .num_elems = num_elems,
                       .is_in_place = is_in_place || (in_place.empty() && salt % 3 == 0),
                       .is_random = is_random,
                       .salt = salt,
                       .is_uneven = is_uneven});
                }
    return cases;
  }
};

/// Every op and algorithm, for groups of `world_size`: nothing; fewer elements than ranks; one
/// each; a longer chunk; many, and odd; and `more`.
inline CaseTable every_collective(int world_size, const std::vector<std::size_t>& more = {}) {
  const auto world = static_cast<std::size_t>(world_size);
  std::set<std::size_t> counts = {0, 1, world - 1, world, world + 1, 1001};
  counts.insert(more.begin(), more.end());
  std::vector<Algorithm> algorithms = kAlgorithms;
  algorithms.push_back(Algorithm::kAuto);
  return {
      .counts = {counts.begin(), counts.end()}, .algorithms = algorithms, .uneven = {false, true}};
}

/// Runs and checks all cases on one rank, with barriers among them.
inline void run_cases(Communicator& communicator, const CaseTable& table) {
  int num_run = 0;
  for (const Case& c : table.of(communicator.world_size())) {
    run_case(communicator, c);
    if (++num_run % 7 == 0) barrier(communicator);
  }
  barrier(communicator);
}

}  // namespace ringcomm::testing
