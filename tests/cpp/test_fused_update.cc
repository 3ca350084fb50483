// reduce_scatter_update_all_gather against the same update of the whole buffer by one rank, with
// gradients whose sums are exact; and against its parts, with any.
#include <array>
#include <atomic>
#include <cstdint>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "collective_case.h"
#include "collectives/fused_update.h"
#include "core/chunk_layout.h"
#include "kernels/updates/update_op.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;
using oracle::Bytes;

constexpr DType kF32 = DType::kFloat32;
constexpr std::uint32_t kNumSteps = 2;

UpdateSpec adamw() {
  return {.lr = 0.1,
          .weight_decay = 0.1,
          .coefficients = {0.9, 0.99, 1e-8},
          .optimizer = Optimizer::kAdamW};
}
UpdateSpec momentum_sgd() {
  return {.lr = 0.1, .grad_scale = 0.5, .coefficients = {0.9}, .optimizer = Optimizer::kSgd};
}
UpdateSpec lomo() {
  return {.lr = 0.1, .weight_decay = 0.1, .coefficients = {1.5}, .optimizer = Optimizer::kLomo};
}

struct UpdateCase {
  UpdateSpec spec = adamw();
  DType grad_dtype = kF32;
  Algorithm algorithm = Algorithm::kAuto;
  Reduction reduction = Reduction::kAvg;
  std::size_t num_elems = 0;
  bool is_random = false;

  Case gradients(std::uint32_t step) const {
    return {.dtype = grad_dtype,
            .reduction = reduction,
            .num_elems = num_elems,
            .is_random = is_random,
            .salt = step};
  }
  std::string to_text() const {
    std::ostringstream text;
    text << describe(spec) << ", gradient " << name_of(grad_dtype) << ", " << name_of(algorithm)
         << ", " << num_elems << " elements";
    return text.str();
  }
};

/// Parameters and state of `range`, as one rank or a single process holds them.
struct Model {
  Model(const UpdateCase& c, const ElemRange& shard)
      : param(c.num_elems * element_bytes(c.spec.param_dtype), 0),
        master(shard.num_elems, 0),
        states{{{shard.num_elems * 4, 4}, {shard.num_elems * 4, 4}}} {
    Bytes values;
    for (std::size_t i = 0; i < c.num_elems; ++i) {
      const float value = static_cast<float>(testing::mixed(static_cast<std::uint32_t>(i))) / 4e9F;
      testing::append_float(values, c.spec.param_dtype, value);
      if (i >= shard.begin_elems && i < shard.end_elems()) master[i - shard.begin_elems] = value;
    }
    param.fill(values);
    for (Guarded& state : states) state.fill(Bytes(shard.num_elems * 4));
  }

  /// The call of a step, without its gradient.
  Collective call(const UpdateCase& c, std::uint32_t step) {
    Collective call{{.num_elems = c.num_elems,
                     .op = OpKind::kReduceUpdateGather,
                     .dtype = c.grad_dtype,
                     .reduction = c.reduction,
                     .algorithm = c.algorithm,
                     .has_update = true,
                     .update = c.spec}};
    call.update.step = step;
    if (c.spec.has_master) call.master = master.data();
    for (std::size_t i = 0; i < static_cast<std::size_t>(num_states(c.spec)); ++i)
      call.states[i] = static_cast<float*>(states[i].data());
    return call;
  }

  Guarded param;
  std::vector<float> master;
  std::array<Guarded, 2> states;
};

/// All of it, updated by one rank with the oracle's sums.
Model expected_model(const UpdateCase& c, int world_size) {
  Model model(c, {0, c.num_elems});
  for (std::uint32_t step = 1; step <= kNumSteps; ++step) {
    const Bytes grad = testing::reduced(c.gradients(step), world_size, 0);
    const Collective call = model.call(c, step);
    const UpdateOp op = make_update_op(call.update, c.grad_dtype);
    op.apply(op.scalars,
             {.param = model.param.data(),
              .grad = grad.data(),
              .master = call.master,
              .states = call.states},
             c.num_elems);
  }
  return model;
}

using RunCall = std::function<void(const Collective&)>;

/// All steps on one rank.
Model run_steps(const UpdateCase& c, int rank, int world_size, const RunCall& run) {
  Model model(c, ChunkLayout(c.num_elems, world_size).chunk(rank));
  for (std::uint32_t step = 1; step <= kNumSteps; ++step) {
    const Bytes grad = testing::input_of(c.gradients(step), rank, 0);
    Bytes grad_kept = grad;
    const void* const input = grad_kept.data();
    void* const output = model.param.data();
    Collective call = model.call(c, step);
    call.inputs = &input;
    call.outputs = &output;
    run(call);
    expect(grad_kept == grad, "an unchanged gradient of " + c.to_text());
  }
  expect(model.param.is_guarded() && model.states[0].is_guarded() && model.states[1].is_guarded(),
         "untouched guards of " + c.to_text());
  return model;
}

void run_update_case(Communicator& communicator, const UpdateCase& c) {
  const int world_size = communicator.world_size();
  const Model model = run_steps(c, communicator.rank(), world_size, [&](const Collective& call) {
    communicator.run(Collective(call), kPatient);
  });
  const Model whole = expected_model(c, world_size);
  expect(model.param.holds(whole.param.content()),
         "the single rank's parameters of " + c.to_text());
  const ElemRange shard = ChunkLayout(c.num_elems, world_size).chunk(communicator.rank());
  for (int k = 0; k < 2; ++k) {
    const Bytes all = whole.states[static_cast<std::size_t>(k)].content();
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(shard.begin_elems * 4);
    expect(model.states[static_cast<std::size_t>(k)].holds(
               {begin, begin + static_cast<std::ptrdiff_t>(shard.num_elems * 4)}),
           "this rank's shard of the state of " + c.to_text());
  }
}

TEST_CASE("updates of every optimizer on boards and rings, worlds 1 to 8") {
  for (int world_size = 1; world_size <= 8; ++world_size) {
    CAPTURE(world_size);
    const auto world = static_cast<std::size_t>(world_size);
    // Nothing; fewer elements than ranks; one each; a longer chunk; many, and odd.
    const std::set<std::size_t> counts = {0, 1, world - 1, world, world + 1, 1001};
    run_ranks(world_size, [&](Communicator& communicator) {
      for (const UpdateSpec& spec : {adamw(), momentum_sgd(), lomo()})
        for (const Algorithm algorithm : {Algorithm::kAuto, Algorithm::kRing})
          for (const std::size_t num_elems : counts)
            run_update_case(communicator,
                            {.spec = spec, .algorithm = algorithm, .num_elems = num_elems});
    });
  }
}

// Elements of the two halves differ in size, both ways.
TEST_CASE("updates of 16-bit parameters and gradients") {
  run_ranks(3, [](Communicator& communicator) {
    for (const Algorithm algorithm : {Algorithm::kAuto, Algorithm::kRing})
      for (const DType param_dtype : {kF32, DType::kFloat16, DType::kBFloat16})
        for (const DType grad_dtype : {kF32, DType::kFloat16, DType::kBFloat16})
          for (const bool has_master : {false, true}) {
            UpdateSpec spec = adamw();
            spec.param_dtype = param_dtype;
            spec.has_master = has_master && param_dtype != kF32;
            run_update_case(communicator, {.spec = spec,
                                           .grad_dtype = grad_dtype,
                                           .algorithm = algorithm,
                                           .reduction = Reduction::kSum,
                                           .num_elems = 2003});
          }
  });
}

// Slices: one, one element more or less, several and a rest.
TEST_CASE("updates in one slice and in several" * doctest::skip(testing::kHasThreadSanitizer)) {
  run_ranks(3, [](Communicator& communicator) {
    constexpr std::size_t kSliceElems = testing::kRingSlotBytes / sizeof(float) * 3;
    for (const Algorithm algorithm : {Algorithm::kAuto, Algorithm::kRing})
      for (const DType grad_dtype : {kF32, DType::kBFloat16})
        for (const std::size_t num_elems :
             {kSliceElems - 1, kSliceElems, kSliceElems + 1, 3 * kSliceElems + 5})
          run_update_case(
              communicator,
              {.grad_dtype = grad_dtype, .algorithm = algorithm, .num_elems = num_elems});
  });
}

// ---- the parts

TEST_CASE("the fused update has the bits of its parts, and of every other rank") {
  constexpr int kWorld = 4;
  for (const std::size_t num_elems : {3U, 20'011U})
    for (const UpdateSpec& spec : {adamw(), momentum_sgd(), lomo()}) {
      const UpdateCase c{.spec = spec, .num_elems = num_elems, .is_random = true};
      UpdateCase on_ring = c;
      on_ring.algorithm = Algorithm::kRing;
      std::array<Bytes, kWorld> params, ring_params;
      run_ranks(kWorld, [&](Communicator& communicator) {
        const int rank = communicator.rank();
        const auto fused = [&](const Collective& call) {
          communicator.run(Collective(call), kPatient);
        };
        const auto in_parts = [&](const Collective& call) {
          const auto run = [&](const Collective& part) {
            communicator.run(Collective(part), kPatient);
            return Traffic{.sent_bytes = 1};
          };
          const Traffic traffic = update_in_parts(call, rank, kWorld, run);
          expect(traffic.sent_bytes == 2, "bytes added up");
        };
        const Model one = run_steps(c, rank, kWorld, fused);
        const Model two = run_steps(c, rank, kWorld, in_parts);
        expect(one.param.content() == two.param.content(), "parameters of " + c.to_text());
        for (std::size_t k = 0; k < 2; ++k)
          expect(one.states[k].content() == two.states[k].content(), "state of " + c.to_text());
        params[static_cast<std::size_t>(rank)] = one.param.content();
        ring_params[static_cast<std::size_t>(rank)] =
            run_steps(on_ring, rank, kWorld, fused).param.content();
      });
      for (std::size_t rank = 1; rank < kWorld; ++rank) {
        CHECK(params[rank] == params[0]);
        CHECK(ring_params[rank] == ring_params[0]);
      }
    }
}

// ---- bytes, and errors

TEST_CASE("the bytes of an update are the gradients of the others and the parameters for them") {
  for (const Algorithm algorithm : {Algorithm::kDirect, Algorithm::kRing}) {
    std::atomic<std::uint64_t> total = 0;
    constexpr std::size_t kNumElems = 3 * 1000 + 1;
    run_ranks(3, [&](Communicator& communicator) {
      UpdateSpec spec = adamw();
      spec.param_dtype = DType::kBFloat16;
      run_update_case(communicator, {.spec = spec, .algorithm = algorithm, .num_elems = kNumElems});
      const Stats::Counts counts =
          communicator.stats().counts(OpKind::kReduceUpdateGather, algorithm);
      expect(counts.num_calls == kNumSteps, "every call counted under its algorithm");
      total += counts.sent_bytes;
    });
    CHECK(total == kNumSteps * 2 * kNumElems * (4 + 2));
  }
}

TEST_CASE("an update that is none is refused, and the group works on") {
  run_ranks(2, [](Communicator& communicator) {
    UpdateCase wrong{.num_elems = 10};
    wrong.spec.lr = -1;
    for (const bool has_update : {true, false}) {
      const auto run = [&](Collective call) {
        if (!has_update) call.update = {};
        communicator.run(Collective(call), kPatient);
      };
      testing::expect_throws<std::invalid_argument>(
          [&] { run_steps(wrong, communicator.rank(), 2, run); },
          {has_update ? "lr must be finite" : "needs an optimizer"});
    }
    run_update_case(communicator, {.num_elems = 10});
  });
}

TEST_CASE("ranks that differ in the step get both texts") {
  for (const Algorithm algorithm : {Algorithm::kAuto, Algorithm::kRing}) {
    run_ranks(2, [&](Communicator& communicator) {
      UpdateCase c{.algorithm = algorithm, .num_elems = 10};
      c.spec.lr = communicator.rank() == 0 ? 0.25 : 0.5;
      const Error error = testing::error_of([&] { run_update_case(communicator, c); });
      testing::expect_error(error, ErrorKind::kMismatch,
                            {"reduce_scatter_update_all_gather", "lr=0.25", "lr=0.5", "adamw"});
    });
  }
}

}  // namespace
