#include <pybind11/pybind11.h>

#include <cstdint>

#include "kernels/losses/torch_softmax_stats.h"

namespace py = pybind11;

namespace ringcomm {
namespace {

// The last entry of a rank's stats, for kernels that write it elsewhere.
py::tuple softmax_shard_entry(int64_t vocab_start, int64_t vocab_size, int64_t ignore_index,
                              double logit_scale, double softcap, int64_t num_classes,
                              bool wants_weighted, bool wants_more) {
  const SoftmaxStats entry =
      shard_entry({vocab_start, vocab_size, ignore_index, logit_scale, softcap}, num_classes,
                  wants_weighted, wants_more);
  return py::make_tuple(entry.max, entry.sum, entry.target, entry.weighted, entry.entropy,
                        entry.argmax);
}

}  // namespace
}  // namespace ringcomm

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "ringcomm's operators that are not communication: torch.ops.ringcomm.*";
  m.def("softmax_shard_entry", &ringcomm::softmax_shard_entry);
}
