#include "device/reduce_op.h"

#include "core/types.h"
#include "device/host/simd_tables.h"

namespace ringcomm::host {
namespace {

// "product bfloat16" is the longest; what does not fit fails to compile, as an index out of range
// in a constant.
constexpr std::size_t kMaxNameBytes = 20;

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

OpTable make_table(const SimdKernels& kernels) {
  OpTable table;
  for (int r = 0; r < kNumReductions; ++r) {
    for (int d = 0; d < kNumDTypes; ++d) {
      // Alignment 1: the kernels load and store with instructions that take any address.
      table.of[r][d] = {.name = kNames.of[r][d].text,
                        .element_bytes = element_bytes(static_cast<DType>(d)),
                        .alignment = 1,
                        .combine = kernels.combine[r][d]};
    }
  }
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
