#pragma once

// One collective on one rank, with inputs that every rank can compute for all, the oracle's result,
// and guards around every buffer.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "collectives/communicator.h"
#include "core/cursor.h"
#include "core/types.h"
#include "reduce_oracle.h"
#include "thread_ranks.h"
#include "transport/shm/segment.h"

namespace ringcomm::testing {

/// Bytes of data in one phase of a board, as the group cuts them: a region less its header.
inline constexpr std::size_t kPhaseBytes = shm::SegmentConfig{}.board_bytes - kLineBytes;

struct Case {
  OpKind op = OpKind::kAllReduce;
  DType dtype = DType::kFloat32;
  Reduction reduction = Reduction::kSum;
  Algorithm algorithm = Algorithm::kAuto;
  int root = -1;
  std::size_t num_elems = 0;
  bool is_in_place = false;
  std::uint32_t ring_num_slots = 0;
  std::uint64_t ring_slot_bytes = 0;
  bool is_random = false;  ///< floats of any size, where small integers make results exact else
  std::uint32_t salt = 0;  ///< other data in every call

  std::string to_text() const {
    std::ostringstream text;
    text << name_of(op) << ' ' << name_of(dtype) << ' ' << name_of(reduction) << ' '
         << name_of(algorithm) << " root " << root << ", " << num_elems << " elements"
         << (is_in_place ? " in place" : "") << ", slots " << ring_num_slots << " of "
         << ring_slot_bytes << ", salt " << salt;
    return text.str();
  }
};

inline bool reduces(OpKind op) {
  return op == OpKind::kAllReduce || op == OpKind::kReduce || op == OpKind::kReduceScatter;
}

/// A buffer between two guards.
class Guarded {
 public:
  Guarded(std::size_t num_bytes, std::size_t offset_bytes)
      : num_bytes_(num_bytes),
        offset_bytes_(kGuardBytes + offset_bytes),
        bytes_(offset_bytes_ + num_bytes + kGuardBytes, kGuard) {}

  void* data() { return bytes_.data() + offset_bytes_; }
  void fill(const oracle::Bytes& content) {
    if (!content.empty()) std::memcpy(data(), content.data(), content.size());
  }
  bool holds(const oracle::Bytes& content) const {
    return content.size() == num_bytes_ && std::equal(content.begin(), content.end(), begin());
  }
  bool is_untouched() const {
    return std::all_of(begin(), begin() + static_cast<std::ptrdiff_t>(num_bytes_), is_guard);
  }
  bool is_guarded() const {
    return std::all_of(bytes_.begin(), begin(), is_guard) &&
           std::all_of(begin() + static_cast<std::ptrdiff_t>(num_bytes_), bytes_.end(), is_guard);
  }
  oracle::Bytes content() const {
    return {begin(), begin() + static_cast<std::ptrdiff_t>(num_bytes_)};
  }

 private:
  static constexpr std::size_t kGuardBytes = 64;
  static constexpr unsigned char kGuard = 0xa5;

  static bool is_guard(unsigned char byte) { return byte == kGuard; }
  oracle::Bytes::const_iterator begin() const {
    return bytes_.begin() + static_cast<std::ptrdiff_t>(offset_bytes_);
  }

  std::size_t num_bytes_;
  std::size_t offset_bytes_;
  oracle::Bytes bytes_;
};

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

/// Small enough that no result of 8 ranks is rounded, even in bfloat16.
inline void append_integer(oracle::Bytes& bytes, DType dtype, int value) {
  switch (dtype) {
    case DType::kFloat16:
      return append(bytes, oracle::kFormatFloat16.encode(static_cast<float>(value)));
    case DType::kBFloat16:
      return append(bytes, oracle::kFormatBFloat16.encode(static_cast<float>(value)));
    case DType::kFloat32:
      return append(bytes, static_cast<float>(value));
    case DType::kFloat64:
      return append(bytes, static_cast<double>(value));
    case DType::kInt16:
      return append(bytes, static_cast<std::int16_t>(value));
    case DType::kInt32:
      return append(bytes, static_cast<std::int32_t>(value));
    case DType::kInt64:
      return append(bytes, static_cast<std::int64_t>(value));
    case DType::kBool:
      return append(bytes, static_cast<std::uint8_t>(value & 1));
    default:
      return append(bytes, static_cast<std::uint8_t>(value));
  }
}

/// What `rank` puts in; `share` tells the shares of a reduce_scatter apart.
inline oracle::Bytes input_of(const Case& c, int rank, int share) {
  oracle::Bytes bytes;
  bytes.reserve(c.num_elems * element_bytes(c.dtype));
  const auto seed = mixed(c.salt * 4096U + static_cast<std::uint32_t>(rank) * 64U +
                          static_cast<std::uint32_t>(share) + 1U);
  std::mt19937 random(seed);
  for (std::size_t i = 0; i < c.num_elems; ++i) {
    if (c.is_random) {
      append(bytes, std::ldexp(static_cast<float>(random()) / 4e9F - 0.5F,
                               static_cast<int>(random() % 20U)));
      continue;
    }
    const auto value = static_cast<int>(mixed(seed + static_cast<std::uint32_t>(i)) % 7U);
    append_integer(bytes, c.dtype, c.reduction == Reduction::kProduct ? 1 + value % 2 : value - 3);
  }
  return bytes;
}

/// The oracle's result of share `share` over all ranks.
inline oracle::Bytes reduced(const Case& c, int world_size, int share) {
  std::vector<oracle::Bytes> inputs;
  for (int rank = 0; rank < world_size; ++rank) inputs.push_back(input_of(c, rank, share));
  return oracle::reduce(c.reduction, c.dtype, inputs, c.num_elems,
                        c.reduction == Reduction::kAvg ? world_size : 1);
}

/// The buffers of one rank's call.
class CaseBuffers {
 public:
  CaseBuffers(const Case& c, int rank, int world_size)
      : case_(c), rank_(rank), world_size_(world_size) {
    const std::size_t num_bytes = c.num_elems * element_bytes(c.dtype);
    // An element off the alignment of vectors, in every second call.
    const std::size_t offset_bytes = c.salt % 2 == 0 ? 0 : element_bytes(c.dtype);
    const int num_inputs = c.op == OpKind::kReduceScatter ? world_size : 1;
    const int num_outputs = c.op == OpKind::kAllGather ? world_size : 1;
    for (int share = 0; share < num_inputs; ++share) {
      inputs_.emplace_back(num_bytes, offset_bytes);
      inputs_.back().fill(input_of(c, rank, share));
      input_pointers_.push_back(inputs_.back().data());
    }
    for (int share = 0; share < num_outputs; ++share) {
      outputs_.emplace_back(num_bytes, offset_bytes);
      output_pointers_.push_back(outputs_.back().data());
    }
    if (c.is_in_place) output_pointers_[output_of_own()] = inputs_[input_of_own()].data();
  }
  CaseBuffers(const CaseBuffers&) = delete;
  CaseBuffers& operator=(const CaseBuffers&) = delete;

  Collective call() const {
    return {.op = case_.op,
            .dtype = case_.dtype,
            .reduction = case_.reduction,
            .algorithm = case_.algorithm,
            .root = case_.root,
            .num_elems = case_.num_elems,
            .inputs = input_pointers_.data(),
            .outputs = output_pointers_.data(),
            .ring_num_slots = case_.ring_num_slots,
            .ring_slot_bytes = case_.ring_slot_bytes};
  }

  /// What the call leaves in its output, or in its first one.
  oracle::Bytes result() const {
    return case_.is_in_place ? inputs_[input_of_own()].content() : outputs_[0].content();
  }

  /// Throws unless every buffer holds what it must after the call.
  void check() const {
    const std::string where = case_.to_text();
    for (std::size_t share = 0; share < outputs_.size(); ++share) {
      const bool is_input = case_.is_in_place && share == output_of_own();
      const Guarded& output = is_input ? inputs_[input_of_own()] : outputs_[share];
      if (is_input || is_written())
        expect(output.holds(expected(static_cast<int>(share))), "the oracle's result of " + where);
      else
        expect(output.is_untouched(), "an untouched output of " + where);
      expect(output.is_guarded(), "untouched guards around the output of " + where);
    }
    for (std::size_t share = 0; share < inputs_.size(); ++share) {
      if (case_.is_in_place && share == input_of_own()) continue;
      expect(inputs_[share].holds(input_of(case_, rank_, static_cast<int>(share))),
             "an unchanged input of " + where);
      expect(inputs_[share].is_guarded(), "untouched guards around the input of " + where);
    }
  }

 private:
  std::size_t output_of_own() const {
    return case_.op == OpKind::kAllGather ? static_cast<std::size_t>(rank_) : 0;
  }
  std::size_t input_of_own() const {
    return case_.op == OpKind::kReduceScatter ? static_cast<std::size_t>(rank_) : 0;
  }
  // Whether this rank's outputs are written: a group of one copies.
  bool is_written() const {
    if (world_size_ == 1) return true;
    if (case_.op == OpKind::kReduce) return rank_ == case_.root;
    return case_.op != OpKind::kBroadcast || rank_ != case_.root;
  }
  oracle::Bytes expected(int share) const {
    if (world_size_ == 1) return input_of(case_, 0, 0);
    switch (case_.op) {
      case OpKind::kAllGather:
        return input_of(case_, share, 0);
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
};

/// Runs and checks one case on one rank.
inline void run_case(Communicator& communicator, const Case& c) {
  CaseBuffers buffers(c, communicator.rank(), communicator.world_size());
  communicator.run(buffers.call(), kPatient);
  buffers.check();
}

}  // namespace ringcomm::testing
