#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/where.h>

#include <cstddef>
#include <limits>

#include "cuda/messages/reduce.h"
#include "reduce/softmax_merge.h"

namespace ringcomm {
namespace {

// The members of SoftmaxStats, as columns of a table of floats.
enum Column : int { kMax, kSum, kTarget, kWeighted, kEntropy, kArgmax };
static_assert(offsetof(SoftmaxStats, argmax) == kArgmax * sizeof(float));

// The terms that a part adds to the sums of both.
struct Terms {
  at::Tensor sum;
  at::Tensor entropy;
};

Terms terms_of(const at::Tensor& part, const at::Tensor& max) {
  const at::Tensor own_max = part.select(1, kMax);
  const at::Tensor own_sum = part.select(1, kSum);
  // Without a logit above -infinity the sum is 0, or NaN where a logit is.
  const at::Tensor distance = at::where(at::eq(own_max, -std::numeric_limits<double>::infinity()),
                                        0.0, at::sub(own_max, max));
  const at::Tensor factor = at::exp(distance);
  const at::Tensor entropy =
      at::add(part.select(1, kEntropy), at::mul(own_sum, distance)).mul_(factor);
  // A distance too large for the sum to count may be too large for a product, too.
  return {at::mul(own_sum, factor), at::where(at::ne(factor, 0), entropy, 0.0)};
}

}  // namespace

void merge_stats_arrays(const at::Tensor& to, const at::Tensor& a, const at::Tensor& b) {
  const auto table = [](const at::Tensor& array) { return array.view({-1, kNumSoftmaxStats}); };
  const at::Tensor rows_a = table(a), rows_b = table(b), rows = table(to);
  const auto indices = [](const at::Tensor& rows_of) {
    return rows_of.view(at::kInt).select(1, kArgmax);
  };
  const at::Tensor max_a = rows_a.select(1, kMax), max_b = rows_b.select(1, kMax);
  const at::Tensor max = at::where(at::lt(max_a, max_b), max_b, max_a);
  const Terms of_a = terms_of(rows_a, max), of_b = terms_of(rows_b, max);
  const at::Tensor argmax =
      at::where(at::eq(max_a, max_b), at::minimum(indices(rows_a), indices(rows_b)),
                at::where(at::gt(max_a, max_b), indices(rows_a), indices(rows_b)));
  const at::Tensor target = at::add(rows_a.select(1, kTarget), rows_b.select(1, kTarget));
  const at::Tensor weighted = at::add(rows_a.select(1, kWeighted), rows_b.select(1, kWeighted));
  rows.select(1, kMax).copy_(max);
  rows.select(1, kSum).copy_(at::add(of_a.sum, of_b.sum));
  rows.select(1, kTarget).copy_(target);
  rows.select(1, kWeighted).copy_(weighted);
  rows.select(1, kEntropy).copy_(at::add(of_a.entropy, of_b.entropy));
  indices(rows).copy_(argmax);
}

}  // namespace ringcomm
