#include <torch/library.h>

// torch.ops.ringcomm.*: updates of weights in place, by their gradients or by what these are made
// of. Fakes and wrappers stand in ringcomm/ops/weight_update.py, the formulas in
// docs/design/optim.md.

namespace ringcomm {

TORCH_LIBRARY_FRAGMENT(ringcomm, m) {
  m.def(
      "sgd_update_(Tensor(a!) weight, Tensor grad, float lr, float weight_decay, float scale, "
      "int rounding_seed=-1, *, Tensor(b!)? low=None, float? clip_value=None, int first_elem=0) "
      "-> ()");
  m.def(
      "linear_sgd_update_(Tensor(a!) weight, Tensor x, Tensor grad_out, float lr, "
      "float weight_decay, float scale, int rounding_seed=-1, *, Tensor(b!)? low=None, "
      "float? clip_value=None) -> ()");
  m.def(
      "embedding_sgd_update_(Tensor(a!) weight, Tensor indices, Tensor grad_out, float lr, "
      "float weight_decay, float scale, int rounding_seed=-1, *, Tensor(b!)? low=None, "
      "float? clip_value=None, int padding_idx=-1) -> ()");
  m.def(
      "square_sums(Tensor grad, float scale, *, float? clip_value=None) "
      "-> (Tensor rows, Tensor cols)");
  m.def(
      "adalomo_squares(Tensor weight, Tensor grad, Tensor row_factor, Tensor col_factor, "
      "float scale, *, Tensor? low=None, float? clip_value=None) -> Tensor");
  m.def(
      "adalomo_update_(Tensor(a!) weight, Tensor grad, Tensor row_factor, Tensor col_factor, "
      "Tensor step_and_decay, float scale, int rounding_seed=-1, *, Tensor(b!)? low=None, "
      "float? clip_value=None, int first_elem=0) -> ()");
  m.def(
      "linear_adalomo_update_(Tensor(a!) weight, Tensor x, Tensor grad_out, "
      "Tensor(b!) exp_avg_sq_row, Tensor(c!) exp_avg_sq_col, float lr, float weight_decay, "
      "float scale, int rounding_seed=-1, *, float beta2, float clip_threshold=1.0, "
      "float eps_grad=1e-30, float eps_weight=1e-3, Tensor(d!)? low=None, "
      "float? clip_value=None) -> ()");
}

}  // namespace ringcomm
