#include <cstring>

#include "reduce/reduce_op.h"
#include "reduce/simd_tables.h"

namespace ringcomm::host {

void copy_bytes(void* to, const void* from, std::size_t num_bytes, StoreKind kind) {
  if (num_bytes == 0) return;  // the pointers may be null, which memcpy does not allow
  if (kind == StoreKind::kStreaming) {
    if (const auto stream_copy = simd_kernels().stream_copy)
      return stream_copy(to, from, num_bytes);
  }
  std::memcpy(to, from, num_bytes);
}

}  // namespace ringcomm::host
