#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "host/rank_record.h"
#include "kernels/common/types.h"
#include "kernels/reductions/reduce_op.h"
#include "kernels/updates/update_op.h"

/// What a call is: its operation, what ranks compare of it, its buffers, and what it has moved.
/// docs/design/architecture.md, "One call", says who makes it and who holds it.
namespace ringcomm {

enum class OpKind : std::uint8_t {
  kBarrier,
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kGather,
  kScatter,
  kAllToAll,
  kReduceUpdateGather,
  kSend,
  kRecv
};
inline constexpr int kNumOpKinds = 12;
inline constexpr const char* kOpNames[kNumOpKinds] = {
    "barrier",   "all_reduce", "reduce",  "reduce_scatter", "all_gather",
    "broadcast", "gather",     "scatter", "all_to_all",     "reduce_scatter_update_all_gather",
    "send",      "recv"};

/// Of any number, because a peer's header may hold it.
constexpr const char* name_of(OpKind op) {
  const auto idx = static_cast<std::size_t>(op);
  return idx < kNumOpKinds ? kOpNames[idx] : "unknown op";
}

/// Whether the elements of the ranks become one.
constexpr bool is_reduction(OpKind op) {
  return op == OpKind::kAllReduce || op == OpKind::kReduce || op == OpKind::kReduceScatter ||
         op == OpKind::kReduceUpdateGather;
}

/// Whether a rank may have shards of sizes that no other rank knows.
constexpr bool has_private_sizes(OpKind op) {
  return op == OpKind::kGather || op == OpKind::kScatter || op == OpKind::kAllToAll;
}

/// Whether ranks have a buffer, or a part of one, for each other.
constexpr bool has_shards(OpKind op) {
  return op == OpKind::kReduceScatter || op == OpKind::kAllGather || has_private_sizes(op);
}

/// How a collective is carried out; docs/design/collectives.md has the steps and bytes of each.
enum class Algorithm : std::uint8_t { kAuto, kOneShot, kTwoShot, kRing, kDirect, kHierarchical };
inline constexpr int kNumAlgorithms = 6;
inline constexpr const char* kAlgorithmNames[kNumAlgorithms] = {"auto", "one_shot", "two_shot",
                                                                "ring", "direct",   "hierarchical"};

/// Of any number, because a peer's header may hold it.
constexpr const char* name_of(Algorithm algorithm) {
  const auto idx = static_cast<std::size_t>(algorithm);
  return idx < kNumAlgorithms ? kAlgorithmNames[idx] : "unknown algorithm";
}

/// One that users may request for all_reduce: the first four, which every transport has. A
/// transport of device tensors may run a different one if the buffers do not allow it; Stats show
/// which one ran. Throws std::invalid_argument naming the known ones.
Algorithm algorithm_from_name(const std::string& name);

/// The caller's name of an element type that is moved but not reduced. It is compared between ranks
/// and shown in messages. Padded with zeros; empty if DType names the type.
using ElementName = std::array<char, 16>;

/// The values that must be equal on all ranks of a collective, except sizes of uneven shards.
/// Peers read and compare it before the data of the first phase.
///
/// The caller sets all fields but those that are the group's, which the Communicator and a
/// transport's plan set.
struct CallHeader {
  std::uint64_t seq = 0;        ///< the group's: the call's number
  std::uint64_t num_elems = 0;  ///< of what one rank contributes or receives; see Collective
  std::int32_t root = -1;
  OpKind op = OpKind::kBarrier;
  DType dtype = DType::kByte;
  Reduction reduction = Reduction::kSum;
  Algorithm algorithm = Algorithm::kAuto;  ///< as requested; from its plan on, the one that runs
  bool is_uneven = false;   ///< the group's: this rank's shards differ in size, and follow in the
                            ///< first phase
  bool has_update = false;  ///< whether `update` is one
  ElementName element_name = {};
  OpKind whole_op = OpKind::kBarrier;  ///< of a part inside a host: of the call over all hosts
  std::uint32_t whole = 0;             ///< likewise: the digest of its header
  UpdateSpec update = {};              ///< of reduce_scatter_update_all_gather, and of its parts

  /// The bytes that peers need. Most calls omit the last member, which would cost a cache line.
  std::size_t num_wire_bytes() const {
    return has_update ? sizeof(CallHeader) : offsetof(CallHeader, update);
  }

  friend bool operator==(const CallHeader&, const CallHeader&) = default;
};
static_assert(sizeof(CallHeader) == kCallHeaderBytes);
static_assert(offsetof(CallHeader, update) <= 64 - 8, "leaves room for a cursor in its cache line");

/// One call of a collective, as one rank makes it: its header, and this rank's buffers.
///
/// `num_elems` is what one rank contributes or receives: the whole buffer of all_reduce, reduce and
/// broadcast, this rank's shard of reduce_scatter, all_gather, gather, scatter and all_to_all.
/// Buffers are contiguous. `inputs` and `outputs` are arrays of one pointer if the call has one
/// buffer, and of world_size pointers in rank order if it has a shard for every rank: inputs of
/// reduce_scatter, all_to_all and (at the root) scatter; outputs of all_gather, all_to_all and (at
/// the root) gather. An output may be the input it corresponds to, and otherwise shares no memory
/// with inputs: check_overlap().
///
/// If the shards differ, `input_elems` and `output_elems` give the number of elements of each of
/// `inputs` and `outputs`: both in all_to_all (whose num_elems is then 0), input_elems in
/// reduce_scatter and scatter, output_elems in all_gather and gather. The sizes are checked for
/// each pair of ranks.
///
/// reduce_scatter_update_all_gather has the gradient as its input and the parameters as its output,
/// num_elems of each and equal on all ranks before; `dtype` is the gradient's. Rank r owns chunk r
/// of ChunkLayout(num_elems, world_size), whatever the algorithm; `master` and `states` have that
/// chunk's length.
struct Collective : CallHeader {
  const void* const* inputs = nullptr;
  void* const* outputs = nullptr;
  const std::size_t* input_elems = nullptr;   ///< null: num_elems each
  const std::size_t* output_elems = nullptr;  ///< null: num_elems each
  float* master = nullptr;                    ///< of an update; null unless it has_master
  std::array<float*, 2> states = {};          ///< of an update: the optimizer's, for the own chunk
  bool is_counted = true;                     ///< in Stats: of the program, not of the library
  bool is_requested = false;                  ///< a plan's: the user has named the algorithm

  std::size_t num_bytes() const { return num_elems * element_bytes(dtype); }
  /// Of an element of the outputs, where those of inputs have the size of `dtype`.
  std::size_t output_element_bytes() const {
    return element_bytes(op == OpKind::kReduceUpdateGather ? update.param_dtype : dtype);
  }
  /// Elements of the shard for, or from, a rank.
  std::size_t input_shard(int rank) const {
    return input_elems != nullptr ? input_elems[rank] : num_elems;
  }
  std::size_t output_shard(int rank) const {
    return output_elems != nullptr ? output_elems[rank] : num_elems;
  }
  /// Gives the call a number in its group of `world_size` ranks, and completes its header.
  void set_number(std::uint64_t number, int world_size) {
    seq = number;
    is_uneven =
        (input_elems != nullptr || output_elems != nullptr) && has_uneven_shards(world_size);
  }
  /// Whether some shard of this rank's has another size than num_elems.
  bool has_uneven_shards(int world_size) const;
};

/// What one rank of a collective with shards has for another one, or expects from it.
struct CallPart {
  void* data;
  std::size_t num_elems;
};
/// Nothing where there is no transfer between the two: beside the root of a gather or scatter, and
/// in a collective without shards.
std::optional<CallPart> part_given(const Collective& call, int rank, int to);
std::optional<CallPart> part_taken(const Collective& call, int rank, int from);

/// The reduction operator of a call. Throws std::invalid_argument where the reduction has no
/// meaning for the type.
inline const ReduceOp& reduce_op_of(const CallHeader& call) {
  const ReduceOp* op = cpu::find_reduce_op(call.reduction, call.dtype);
  if (op == nullptr)
    throw std::invalid_argument(std::string("reduction ") + name_of(call.reduction) +
                                " is not defined for " + name_of(call.dtype));
  return *op;
}
/// The reduction of all steps but the last one, which divides for an average.
inline Reduction undivided(Reduction reduction) {
  return reduction == Reduction::kAvg ? Reduction::kSum : reduction;
}
/// The divisor of the last step of the reduction.
inline int divisor_of(const CallHeader& call, int world_size) {
  return call.reduction == Reduction::kAvg ? world_size : 1;
}
/// Elements at `elems` of a buffer of `element_bytes` each.
inline const std::byte* at(const void* buffer, std::size_t elems, std::size_t element_bytes) {
  return static_cast<const std::byte*>(buffer) + elems * element_bytes;
}
inline std::byte* at(void* buffer, std::size_t elems, std::size_t element_bytes) {
  return static_cast<std::byte*>(buffer) + elems * element_bytes;
}

/// Throws std::invalid_argument where an input and an output share memory and the output is not the
/// one in place: all ranks that may still need the input would read results.
void check_overlap(const Collective& call, int rank, int world_size);

// ---- headers of two ranks

/// What two headers of one call have in common, whatever the sizes.
CallHeader without_sizes(CallHeader header);
bool is_same_call(const CallHeader& a, const CallHeader& b);
/// With a digest for the size, where shards differ in size in the same way on all ranks: those of
/// an uneven reduce_scatter or all_gather.
CallHeader with_digest_of_shards(const Collective& call, int world_size);
/// Of what ranks of one host have in common in one call.
std::uint32_t digest_of(CallHeader header);

/// "all_reduce #118 (sum, bfloat16, 8388608 bytes, two_shot)"
std::string describe(const CallHeader& header);
/// "rank 1 called broadcast #7 (...) instead", for a message that has named this rank's call, which
/// is an `our_op`. If only one of the two calls is a barrier or a broadcast, it asks about the
/// likely cause.
std::string describe_difference(int peer, const CallHeader& theirs, const std::string& our_op);
/// The same of what `from` has for `to`, and `to` expects.
std::string size_difference(int from, std::uint64_t has_bytes, int to, std::uint64_t expects_bytes);

// ---- what calls have moved

/// The traffic of one call on this rank.
struct Traffic {
  std::uint64_t sent_bytes = 0;  ///< bytes that peers consume from this rank
  /// Bytes that this rank wrote where its peers read them, and that it copied from there or from
  /// its own input into its results. What a reduction writes straight into a result is no copy.
  std::uint64_t copied_bytes = 0;
  Algorithm algorithm = Algorithm::kDirect;  ///< the algorithm that ran; the location of buffers
                                             ///< may allow a better one than planned
  /// Of GPU tensors: 1 if peers could use this rank's buffers where they are, or if they could not
  /// and the call is long enough for it. Then it is staged, and these bytes alone are copied_bytes.
  std::uint64_t num_in_place = 0, num_staged = 0;
};

/// Counters of one rank, by collective and algorithm. May be read while other threads count.
class Stats {
 public:
  template <class Number>
  struct CountsOf {
    Number num_calls = 0;
    Number sent_bytes = 0;  ///< as in Traffic
    Number copied_bytes = 0;
    Number num_in_place = 0;
    Number num_staged = 0;
  };
  using Counts = CountsOf<std::uint64_t>;

  /// Adds a call to these counters and to those of all groups.
  void count(OpKind op, const Traffic& traffic) {
    for (Stats* stats : {this, &process_wide()}) {
      auto& cell =
          stats->cells_[static_cast<std::size_t>(op)][static_cast<std::size_t>(traffic.algorithm)];
      cell.num_calls.fetch_add(1, std::memory_order_relaxed);
      cell.sent_bytes.fetch_add(traffic.sent_bytes, std::memory_order_relaxed);
      cell.copied_bytes.fetch_add(traffic.copied_bytes, std::memory_order_relaxed);
      cell.num_in_place.fetch_add(traffic.num_in_place, std::memory_order_relaxed);
      cell.num_staged.fetch_add(traffic.num_staged, std::memory_order_relaxed);
    }
  }

  Counts counts(OpKind op, Algorithm algorithm) const {
    const auto& cell = cells_[static_cast<std::size_t>(op)][static_cast<std::size_t>(algorithm)];
    return {cell.num_calls, cell.sent_bytes, cell.copied_bytes, cell.num_in_place, cell.num_staged};
  }

  static Stats& process_wide() {
    static Stats stats;
    return stats;
  }

 private:
  std::array<std::array<CountsOf<std::atomic<std::uint64_t>>, kNumAlgorithms>, kNumOpKinds> cells_;
};

// ---- a group's options

/// Must be equal on all ranks of a group, but for those that are said to be this rank's.
struct CommunicatorOptions {
  Algorithm algorithm = Algorithm::kAuto;  ///< of all_reduce
  bool is_rank_ordered = false;            ///< reductions equal to the left-to-right sum over ranks
  std::size_t one_shot_max_bytes = 0;      ///< where one_shot ends; 0: where calls find it
  std::string transport = {};              ///< "shm", "messages", or "": by where the ranks are
  std::string message_backend = {};        ///< what carries messages, where anything does
  // This rank's.
  std::string host_id = {};  ///< where it is; empty: found out
  int max_threads = 0;       ///< for its copies and sums; see host::ThreadPool
  bool log_waits = true;     ///< long waits are written to stderr (recorder::LongWaits)

  /// "algorithm=auto deterministic=none one_shot_max_bytes=0 ..."
  std::string to_text() const;
};

}  // namespace ringcomm
