#include "reduce/reduce_op.h"

#include <cstring>

#include "core/types.h"
#include "reduce/simd_tables.h"
#include "reduce/softmax_merge.h"

namespace ringcomm::host {
namespace {

// "product softmax_stats" would be the longest; what does not fit fails to compile, as an index out
// of range in a constant.
constexpr std::size_t kMaxNameBytes = 24;

struct OpName {
  char text[kMaxNameBytes] = {};
};

constexpr OpName make_name(Reduction reduction, DType dtype) {
  OpName name;
  std::size_t length = 0;
  for (const char* c = name_of(reduction); *c != '\0'; ++c) name.text[length++] = *c;
  name.text[length++] = ' ';
  for (const char* c = name_of(dtype); *c != '\0'; ++c) name.text[length++] = *c;
  name.text[length] = '\0';
  return name;
}

struct OpNames {
  OpName of[kNumReductions][kNumDTypes];
};

constexpr OpNames make_names() {
  OpNames names;
  for (int r = 0; r < kNumReductions; ++r) {
    for (int d = 0; d < kNumDTypes; ++d)
      names.of[r][d] = make_name(static_cast<Reduction>(r), static_cast<DType>(d));
  }
  return names;
}

constexpr OpNames kNames = make_names();

struct OpTable {
  ReduceOp of[kNumReductions][kNumDTypes];
};

void merge_stats(void* to, void* also_to, const void* const* srcs, int num_srcs,
                 std::size_t num_elems, int) {
  for (std::size_t i = 0; i < num_elems; ++i) {
    const auto element = [&](int src) {
      SoftmaxStats stats;
      std::memcpy(&stats, static_cast<const char*>(srcs[src]) + i * sizeof stats, sizeof stats);
      return stats;
    };
    SoftmaxStats merged = element(0);
    for (int src = 1; src < num_srcs; ++src) merged = merge(merged, element(src));
    std::memcpy(static_cast<char*>(to) + i * sizeof merged, &merged, sizeof merged);
    if (also_to != nullptr)
      std::memcpy(static_cast<char*>(also_to) + i * sizeof merged, &merged, sizeof merged);
  }
}

OpTable make_table(const SimdKernels& kernels) {
  OpTable table;
  for (int r = 0; r < kNumReductions; ++r) {
    for (int d = 0; d < kNumDTypes; ++d) {
      table.of[r][d] = {.name = kNames.of[r][d].text,
                        .element_bytes = element_bytes(static_cast<DType>(d)),
                        .combine = kernels.combine[r][d]};
    }
  }
  table.of[static_cast<int>(Reduction::kMerge)][static_cast<int>(DType::kSoftmaxStats)].combine =
      merge_stats;
  return table;
}

}  // namespace

const ReduceOp* find_reduce_op(Reduction reduction, DType dtype) {
  static const OpTable table = make_table(simd_kernels());
  const int r = static_cast<int>(reduction);
  const int d = static_cast<int>(dtype);
  if (r >= kNumReductions || d >= kNumDTypes) return nullptr;
  const ReduceOp& op = table.of[r][d];
  return op.combine == nullptr ? nullptr : &op;
}

}  // namespace ringcomm::host
