// The optimizers' updates: fp32 against double with a bound on the error, everything else against
// fp32 to the last bit, at every SIMD level.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/common/tables.h"
#include "kernels/common/types.h"
#include "operator_case.h"
#include "reduce_oracle.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;
using cpu::Kernels;
using oracle::Bytes;

// Nothing; a tail alone; around one vector of every width; many with and without a tail.
constexpr std::size_t kSizes[] = {0, 1, 3, 4, 5, 8, 15, 16, 17, 1000, 1031};
constexpr std::size_t kMaxElems = 1031;

UpdateSpec spec_of(Optimizer optimizer, std::array<double, 3> coefficients, double weight_decay,
                   std::uint32_t step = 3) {
  return {.lr = 0.05,
          .weight_decay = weight_decay,
          .grad_scale = 0.7,
          .coefficients = coefficients,
          .step = step,
          .optimizer = optimizer};
}

UpdateSpec nesterov(UpdateSpec spec) {
  spec.is_nesterov = true;
  return spec;
}

std::vector<UpdateSpec> specs() {
  return {
      spec_of(Optimizer::kSgd, {}, 0),
      spec_of(Optimizer::kSgd, {}, 0.1),
      spec_of(Optimizer::kSgd, {0.9, 0.0}, 0.1),
      spec_of(Optimizer::kSgd, {0.9, 0.3}, 0),
      spec_of(Optimizer::kSgd, {0.9, 0.3}, 0.1, 1),  // the first step takes the whole gradient
      nesterov(spec_of(Optimizer::kSgd, {0.8, 0.0}, 0.1)),
      spec_of(Optimizer::kAdamW, {0.9, 0.999, 1e-8}, 0.1, 1),
      spec_of(Optimizer::kAdamW, {0.9, 0.999, 1e-3}, 0.1),
      spec_of(Optimizer::kAdamW, {0.3, 0.5, 1e-8}, 0, 1000),  // torch's lerp from the other end
      spec_of(Optimizer::kLomo, {}, 0),
      spec_of(Optimizer::kLomo, {0.25}, 0.1),
  };
}

// ---- the oracle: double arithmetic that carries along how large its terms were

struct Term {
  double value = 0;
  double size = 0;  // of what was added up: rounding errors are a few units in its last place

  Term(double v) : value(v), size(std::fabs(v)) {}
  Term(double v, double s) : value(v), size(s) {}
};

Term operator+(const Term& a, const Term& b) { return {a.value + b.value, a.size + b.size}; }
Term operator*(double a, const Term& b) { return {a * b.value, std::fabs(a) * b.size}; }
Term divided(const Term& a, const Term& b) {
  const double value = a.value / b.value;
  return {value, a.size / std::fabs(b.value) + std::fabs(value) * b.size / std::fabs(b.value)};
}

struct Element {
  Term weight, grad, first, second;
};

void step(const UpdateSpec& spec, Element& e) {
  const auto& own = spec.coefficients;
  e.grad = spec.grad_scale * e.grad;
  if (spec.optimizer == Optimizer::kSgd) {
    e.grad = e.grad + spec.weight_decay * e.weight;
    if (own[sgd::kMomentum] != 0) {
      e.first = spec.step == 1
                    ? e.grad
                    : own[sgd::kMomentum] * e.first + (1 - own[sgd::kDampening]) * e.grad;
      e.grad = spec.is_nesterov ? e.grad + own[sgd::kMomentum] * e.first : e.first;
    }
    e.weight = e.weight + -spec.lr * e.grad;
    return;
  }
  e.weight = (1 - spec.lr * spec.weight_decay) * e.weight;
  if (spec.optimizer == Optimizer::kLomo) {
    const double clip = own[lomo::kClipValue];
    if (clip > 0) e.grad = Term(std::clamp(e.grad.value, -clip, clip));
    e.weight = e.weight + -spec.lr * e.grad;
    return;
  }
  const double beta1 = own[adamw::kBeta1], beta2 = own[adamw::kBeta2];
  e.first = beta1 * e.first + (1 - beta1) * e.grad;
  e.second = beta2 * e.second + (1 - beta2) * Term(e.grad.value * e.grad.value);
  const Term corrected =
      1 / std::sqrt(1 - std::pow(beta2, spec.step)) * Term(std::sqrt(e.second.value));
  const Term direction = divided(e.first, corrected + own[adamw::kEps]);
  e.weight = e.weight + -spec.lr / (1 - std::pow(beta1, spec.step)) * direction;
}

// ---- the operands

struct Operands {
  Floats weight, grad, first, second;
};

Operands random_operands() {
  std::mt19937 random(7);
  Operands x;
  for (Floats* values : {&x.weight, &x.grad, &x.first, &x.second})
    *values = testing::random_floats(random, kMaxElems);
  for (float& value : x.second) value = std::fabs(value);  // a mean of squares
  return x;
}

Operands special_operands() {
  Operands x = random_operands();
  testing::put_special(x.grad, 2);
  testing::put_special(x.weight, 6);
  testing::put_special(x.first, 10);
  return x;
}

/// One call on `num_elems` elements, one element off the alignment; the memory after them must not
/// change.
struct Run {
  Run(const Kernels& kernels, UpdateSpec spec, DType param_dtype, DType grad_dtype,
      const Operands& from, std::size_t num_elems)
      : param(encoded(from.weight, param_dtype)), x(from) {
    spec.param_dtype = param_dtype;
    const Bytes grad = encoded(from.grad, grad_dtype);
    const Bytes param_before = param;
    const int count = num_states(spec);
    kernels.updates[static_cast<int>(spec.optimizer)][cpu::float_dtype_idx(
        param_dtype)][cpu::float_dtype_idx(grad_dtype)](
        scalars_of(spec),
        {.param = param.data(),
         .grad = grad.data(),
         .master = spec.has_master ? x.weight.data() : nullptr,
         .states = {count > 0 ? x.first.data() : nullptr, count > 1 ? x.second.data() : nullptr}},
        num_elems);
    const std::size_t param_bytes = num_elems * element_bytes(param_dtype);
    CHECK(std::equal(param.begin() + static_cast<std::ptrdiff_t>(param_bytes), param.end(),
                     param_before.begin() + static_cast<std::ptrdiff_t>(param_bytes)));
    for (const auto& [after, before] :
         {std::pair{&x.weight, &from.weight}, {&x.first, &from.first}, {&x.second, &from.second}})
      CHECK(is_same({after->begin() + static_cast<std::ptrdiff_t>(num_elems), after->end()},
                    {before->begin() + static_cast<std::ptrdiff_t>(num_elems), before->end()}));
    if (param_dtype == DType::kFloat32 && !param.empty())
      std::memcpy(x.weight.data(), param.data(), param.size());
  }

  Bytes param;
  Operands x;  // with the weights of fp32 parameters, or their master
};

constexpr DType kF32 = DType::kFloat32;

void check_near(const char* what, std::size_t i, float actual, const Term& expected) {
  // Six roundings of half a unit each; one more where a scalar was rounded.
  const double bound = 3.5 * std::ldexp(expected.size, -23) + 1e-44;
  if (std::fabs(actual - expected.value) <= bound) return;
  CAPTURE(what);
  CAPTURE(i);
  CHECK(actual == doctest::Approx(expected.value).epsilon(0));
}

TEST_CASE("updates in fp32 are those of double but for a few roundings") {
  const Operands before = random_operands();
  for (const Kernels* kernels : kernel_levels())
    for (const UpdateSpec& spec : specs()) {
      CAPTURE(describe(spec));
      const Run run(*kernels, spec, kF32, kF32, before, kMaxElems);
      for (std::size_t i = 0; i < kMaxElems; ++i) {
        Element e{before.weight[i], before.grad[i], before.first[i], before.second[i]};
        step(spec, e);
        check_near("weight", i, run.x.weight[i], e.weight);
        check_near("first", i, run.x.first[i], e.first);
        check_near("second", i, run.x.second[i], e.second);
      }
    }
}

TEST_CASE("updates of every size have the same bits at every level, and touch no more") {
  for (const UpdateSpec& spec : specs())
    for (const std::size_t num_elems : kSizes) {
      CAPTURE(describe(spec));
      CAPTURE(num_elems);
      const Operands before = special_operands();
      const Run expected(cpu::kBaselineKernels, spec, kF32, kF32, before, num_elems);
      for (const Kernels* kernels : kernel_levels()) {
        const Run run(*kernels, spec, kF32, kF32, before, num_elems);
        CHECK(run.param == expected.param);
        CHECK(is_same(run.x.first, expected.x.first));
        CHECK(is_same(run.x.second, expected.x.second));
      }
    }
}

TEST_CASE("values that are not finite go into parameters and state, as the canonical NaN") {
  for (const UpdateSpec& spec : specs()) {
    CAPTURE(describe(spec));
    Operands before = random_operands();
    before.grad[5] = -std::nanf("0x77");
    const Run run(cpu::kBaselineKernels, spec, kF32, kF32, before, kMaxElems);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    CHECK(std::memcmp(&run.x.weight[5], &nan, sizeof nan) == 0);
    CHECK(std::isfinite(run.x.weight[6]));
    if (num_states(spec) > 0) CHECK(std::memcmp(&run.x.first[5], &nan, sizeof nan) == 0);
  }
}

TEST_CASE("16-bit parameters and gradients are updated as in fp32, and rounded once") {
  for (const Kernels* kernels : kernel_levels())
    for (const DType param_dtype : cpu::kFloatDTypes)
      for (const DType grad_dtype : cpu::kFloatDTypes)
        for (UpdateSpec spec : specs())
          for (const bool has_master : {false, true}) {
            if (param_dtype == kF32 && has_master) continue;
            spec.has_master = has_master;
            CAPTURE(describe(spec));
            CAPTURE(name_of(grad_dtype));
            Operands before = special_operands();
            const Run run(*kernels, spec, param_dtype, grad_dtype, before, kMaxElems);
            if (!has_master)
              before.weight = decoded(encoded(before.weight, param_dtype), param_dtype);
            before.grad = decoded(encoded(before.grad, grad_dtype), grad_dtype);
            spec.has_master = false;
            const Run wide(*kernels, spec, kF32, kF32, before, kMaxElems);
            CHECK(run.param == encoded(wide.x.weight, param_dtype));
            if (has_master) CHECK(is_same(run.x.weight, wide.x.weight));
            CHECK(is_same(run.x.first, wide.x.first));
            CHECK(is_same(run.x.second, wide.x.second));
          }
}

TEST_CASE("what is no step is refused by name") {
  const auto refused = [](UpdateSpec spec, const std::string& text, DType grad_dtype = kF32) {
    testing::expect_throws<std::invalid_argument>([&] { make_update_op(spec, grad_dtype); },
                                                  {text});
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const UpdateSpec good = spec_of(Optimizer::kSgd, {0.9}, 0);
  const auto with = [&good](auto change) {
    UpdateSpec spec = good;
    change(spec);
    return spec;
  };
  refused({}, "needs an optimizer");
  refused(with([](UpdateSpec& s) { s.step = 0; }), "step must be 1 or more");
  refused(with([](UpdateSpec& s) { s.lr = -1; }), "lr must be finite");
  refused(with([&](UpdateSpec& s) { s.weight_decay = nan; }), "weight_decay must be finite");
  refused(with([&](UpdateSpec& s) { s.grad_scale = nan; }), "grad_scale must be finite");
  refused(with([](UpdateSpec& s) { s.has_master = true; }), "16-bit parameters");
  refused(nesterov(spec_of(Optimizer::kSgd, {0.0}, 0)), "nesterov needs");
  refused(nesterov(spec_of(Optimizer::kSgd, {0.9, 0.1}, 0)), "nesterov needs");
  refused(spec_of(Optimizer::kSgd, {-0.9}, 0), "momentum must be finite");
  refused(spec_of(Optimizer::kSgd, {0.9, nan}, 0), "dampening must be finite");
  refused(spec_of(Optimizer::kAdamW, {0.9, 1.0, 1e-8}, 0), "betas must be");
  refused(spec_of(Optimizer::kAdamW, {0.9, 0.9, -1}, 0), "eps must be finite");
  refused(spec_of(Optimizer::kLomo, {-1}, 0), "clip_value must be positive");
  refused(with([](UpdateSpec& s) { s.param_dtype = DType::kFloat64; }), "float64 and float32");
  refused(good, "float32 and int32", DType::kInt32);
}

}  // namespace
