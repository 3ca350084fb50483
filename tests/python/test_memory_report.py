"""The memory of a training step: what is predicted against what the allocator saw."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._tools.mem_tracker import MemTracker

from ringcomm.optim import AdaLomo, Lomo, MemoryReport, memory_report
from ringcomm.optim.update_memory import update_bytes

HIDDEN, VOCAB = 128, 1024
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
IDS = torch.arange(128).view(2, 64)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """The profiler sees what operators allocate in its own thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_llama(dtype: torch.dtype, *, is_checkpointed: bool = False) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()
    if is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def llama_loss(model: Any) -> Tensor:
    loss: Tensor = model(input_ids=IDS, labels=IDS).loss
    return loss


class Net(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.table = nn.Embedding(512, width)
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(self.norm(self.up(self.table(ids))).relu()).float().square().mean()


def net_loss(model: Any) -> Tensor:
    loss: Tensor = model(IDS)
    return loss


def assert_agrees(report: MemoryReport) -> None:
    """Within 5 percent of every part, or the floor."""
    for found in report.steps:
        assert found.measured is not None
        assert sum(found.measured.at_peak.values()) == found.measured.peak
        assert list(found.differences()) == [], f"{found.name}\n{report}"


SHORT = [
    (torch.float32, False, ("sgd", "lomo", "adalomo"), (None, "deferred", "two_pass")),
    (torch.float32, True, ("adamw", "lomo"), (None, "two_pass")),
    (torch.bfloat16, False, ("adamw", "lomo"), (None,)),
    (torch.bfloat16, True, ("sgd", "adalomo"), (None, "deferred")),
]


@pytest.mark.parametrize(("dtype", "is_checkpointed", "optimizers", "clip_modes"), SHORT)
def test_a_prediction_is_what_is_measured(
    dtype: torch.dtype,
    is_checkpointed: bool,
    optimizers: tuple[str, ...],
    clip_modes: tuple[str | None, ...],
) -> None:
    model = make_llama(dtype, is_checkpointed=is_checkpointed)
    report = memory_report(model, llama_loss, optimizers=optimizers, clip_modes=clip_modes)
    assert_agrees(report)
    lomo = [step for step in report.steps if step.name.startswith(("lomo", "adalomo"))]
    for step in lomo:
        # All but the norms' weights are fused: none of their gradients is ever a tensor of torch's.
        is_held = step.name.endswith("deferred")
        assert (step.predicted.gradients > 100 << 10) == is_held


@pytest.mark.parametrize(
    "options",
    [
        {"master": "split", "dtype": torch.bfloat16},
        {"accumulation_steps": 2},
        {"loss_scale": 64.0, "dtype": torch.bfloat16},
        {"loss_scale": 64.0, "clip_mode": "two_pass"},
        {"loss_scale": 64.0, "overflow": "skip_layer"},
        {"stochastic_rounding": True, "dtype": torch.bfloat16},
    ],
)
def test_options(options: dict[str, Any]) -> None:
    options = dict(options)
    model = Net().to(options.pop("dtype", torch.float32))
    clip_mode = options.pop("clip_mode", None)
    optimizers = ("sgd", "lomo", "adalomo")
    report = memory_report(
        model, net_loss, optimizers=optimizers, clip_modes=(clip_mode,), **options
    )
    assert_agrees(report)
    weights = sum(param.numel() for param in model.parameters())
    params = report["sgd"].predicted.parameters
    lomo = report["lomo" if clip_mode is None else "lomo two_pass"].predicted
    assert lomo.states - (2 * weights if "master" in options else 0) < 64
    has_all = "accumulation_steps" in options
    assert (lomo.gradients == params) == has_all


def test_parts_by_hand() -> None:
    """The closed forms of what is kept from step to step."""
    model = Net().bfloat16()
    report = memory_report(model, net_loss, master="split", measure_too=False)
    weights = list(model.parameters())
    total = sum(weight.nbytes for weight in weights)
    assert {step.predicted.parameters for step in report.steps} == {total}
    second_moments = sum(4 * (sum(w.shape) if w.dim() == 2 else w.numel()) for w in weights)
    tokens = 3 * 4  # of fused layers
    sgd, adamw, lomo, adalomo = (step.predicted.states for step in report.steps)
    assert (sgd, lomo, adalomo) == (0, total + tokens, total + second_moments + tokens)
    assert 0 <= adamw - 2 * total <= 4 * len(weights)  # and a count for each weight
    assert [report[name].predicted.gradients for name in ("sgd", "adamw")] == [total, total]
    # Of what is not fused the largest, which comes with its bias.
    assert report["lomo"].predicted.gradients == model.norm.weight.nbytes + model.norm.bias.nbytes
    # One gradient in fp32.
    assert report["adalomo"].predicted.updates > 4 * model.up.weight.numel()
    assert all(step.measured is None and not list(step.differences()) for step in report.steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_own_tracker_agrees(dtype: torch.dtype) -> None:
    """AdamW as MemTracker sees a real step, which knows nothing of this report."""
    model = make_llama(dtype)
    found = memory_report(model, llama_loss, optimizers=("adamw",), measure_too=False).steps[0]
    opt = torch.optim.AdamW(model.parameters())
    llama_loss(model).backward()
    opt.step()
    opt.zero_grad()
    tracker = MemTracker()
    tracker.track_external(model, opt)
    with tracker:
        loss = llama_loss(model)
        kept = tracker.get_tracker_snapshot()[torch.device("cpu")]
        loss.backward()
        made = tracker.get_tracker_snapshot()[torch.device("cpu")]
    kinds = {str(getattr(kind, "value", kind)): kind for kind in kept}
    for part, kind, seen in (
        ("parameters", "Parameter", kept),
        ("activations", "Activation", kept),
        ("states", "Optstate", kept),
        ("gradients", "Gradient", made),
    ):
        predicted = getattr(found.predicted, part)
        assert predicted == pytest.approx(seen[kinds[kind]], rel=0.05), part
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert found.predicted.peak == pytest.approx(peak, rel=0.05)


class _KeepsMore(torch.autograd.Function):
    """Keeps 1 MiB for the backward pass that its fake does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            ctx.more = torch.zeros(1 << 18)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def test_a_wrong_prediction_shows() -> None:
    model = Net()
    report = memory_report(
        model, lambda m: _KeepsMore.apply(net_loss(m)), optimizers=("sgd", "lomo")
    )
    for found in report.steps:
        assert found.measured is not None
        excess = found.measured.activations - found.predicted.activations
        assert excess == 1 << 20
        assert {part for part, _, _ in found.differences()} >= {"activations"}


def describe(module: nn.Module) -> tuple[Any, ...]:
    return type(module), list(module._forward_hooks), list(module._forward_pre_hooks)


def test_a_model_stays_as_it_was() -> None:
    model = make_llama(torch.float32, is_checkpointed=True)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    before = copy.deepcopy(model.state_dict())
    grad = model.lm_head.weight.grad.clone()
    modules = [describe(module) for module in model.modules()]
    random = torch.get_rng_state()
    memory_report(
        model,
        lambda m: llama_loss(m) + torch.rand([]),
        optimizers=("sgd", "lomo"),
        clip_modes=("two_pass",),
    )
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.lm_head.weight.grad, grad)
    assert sum(param.grad is not None for param in model.parameters()) == 1
    assert [describe(module) for module in model.modules()] == modules
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    for make in (Lomo, AdaLomo):  # nobody has the model's gradients
        make(model).close()


def test_sizes_that_depend_on_values_are_the_largest() -> None:
    class Gated(Net):
        def forward(self, ids: Tensor) -> Tensor:
            rows = self.up(self.table(ids)).flatten(0, 1)
            chosen = rows[rows.sum(1) > -1e9]
            return chosen.square().mean() if bool((ids >= 0).all()) else chosen.sum()

    report = memory_report(Gated(), net_loss, optimizers=("lomo",), clip_modes=("deferred",))
    assert_agrees(report)


def test_rows_and_numbers() -> None:
    model = Net(16)
    report = memory_report(model, net_loss, clip_modes=(None, "deferred"))
    names = ["sgd", "adamw", "lomo", "lomo deferred", "adalomo", "adalomo deferred"]
    assert [step.name for step in report.steps] == names
    numbers = json.loads(json.dumps(report.as_dict()))
    assert numbers["steps"][0]["predicted"]["parameters"] == report["sgd"].predicted.parameters
    text = str(report)
    assert all(name in text for name in (*names, "activations", "RSS"))
    with pytest.raises(KeyError, match="lion"):
        report["lion"]


@pytest.mark.parametrize("tokens", [16, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["sgd", "adalomo"])
def test_operators_take_what_is_predicted(kind: str, dtype: torch.dtype, tokens: int) -> None:
    """Of larger weights than those of the models here; 5 percent and the floor."""
    from torch.profiler import ProfilerActivity, profile

    weight = torch.zeros(1536, 1024, dtype=dtype)
    x, grad_out = (torch.zeros(tokens, size, dtype=dtype) for size in (1024, 1536))
    args: tuple[Any, ...] = (weight, x, grad_out)
    options: dict[str, float] = {}
    if kind == "adalomo":
        args = (*args, torch.ones(1536), torch.ones(1024))
        options = {"beta2": 0.5}
    func = getattr(torch.ops.ringcomm, f"linear_{kind}_update_").default
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        func(*args, 1e-3, 0.0, 1.0, **options)
    now = most = 0
    found = profiler.profiler.kineto_results.experimental_event_tree()
    changes = []
    while found:
        event = found.pop()
        found += event.children
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    predicted = update_bytes(func, args, torch.device("cpu"))
    assert abs(predicted - most) <= max(0.05 * most, 64 << 10)


def replicas_agree(rank: int) -> None:
    torch.set_num_threads(1)
    report = memory_report(
        Net(),
        net_loss,
        optimizers=("lomo", "adalomo"),
        clip_modes=(None, "deferred"),
        group=dist.group.WORLD,
    )
    assert_agrees(report)
    largest, total = 4 * 512 * 256, report["lomo"].predicted.parameters
    assert 0 <= report["lomo"].predicted.gradients - largest <= 4096  # with a bias
    assert 0 <= report["lomo deferred"].predicted.gradients - total < 64  # with their norm
    memory_report(Net(), net_loss, optimizers=("lomo",), measure_too=False)  # this rank alone


def test_replicas() -> None:
    run_ranks(2, replicas_agree)


def test_wrong_arguments() -> None:
    model = Net(16)
    with pytest.raises(ValueError, match="some of sgd, adamw, lomo, adalomo, got 'lion'"):
        memory_report(model, net_loss, optimizers=("lion",))
    with pytest.raises(ValueError, match="nothing to report"):
        memory_report(model, net_loss, optimizers=())
    with pytest.raises(ValueError, match="step\\(m\\) is to run the model m"):
        memory_report(model, lambda _: net_loss(model), optimizers=("sgd",))
    assert all(param.grad is None for param in model.parameters())
    with pytest.raises(TypeError, match="returns the loss"):
        memory_report(model, lambda m: net_loss(m).detach(), optimizers=("sgd",))
    with pytest.raises(ValueError, match="cannot accumulate"):
        memory_report(
            model,
            net_loss,
            optimizers=("lomo",),
            clip_modes=("two_pass",),
            accumulation_steps=2,
        )
    opt = Lomo(model)
    with pytest.raises(ValueError, match="has an optimizer in its backward pass already"):
        memory_report(model, net_loss, optimizers=("lomo",))
    opt.close()
    with pytest.raises(ValueError, match="no parameter that requires grad"):
        memory_report(model.requires_grad_(False), net_loss)
