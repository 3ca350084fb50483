"""parallelize(): every axis and their pairs train as one process does, or are refused at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import quick, slow
from ranks import in_ranks, place, run_ranks
from steps import apply_steps, train_step
from torch import Tensor, nn

from ringcomm.nn import ColumnParallelLinear, RowParallelLinear
from ringcomm.parallel import ParallelDims, parallelize

transformers = pytest.importorskip("transformers")
assert transformers.LlamaForCausalLM  # imported before ranks are forked

WORLD, ROWS, LENGTH, STEPS, LR, MAX_NORM = 4, 8, 12, 3, 0.3, 1.0
SIZES = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama, 16 bits": {"dtype": torch.bfloat16},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 5},
    "Mixtral": {"num_local_experts": 4, "sliding_window": None},
    "Mixtral, one expert a token": {"num_local_experts": 4, "num_experts_per_tok": 1},
    "Qwen3Moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "head_dim": 12,
    },
    "Qwen2Moe": {  # with a shared expert and its gate
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "decoder_sparse_step": 2,
    },
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {  # whose sigmoid gates choose in groups, with a bias
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "Gemma2": {"head_dim": 12, "sliding_window": 4},
    "Phi": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
}
# Model, sizes of the mesh, options.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dp, micro-batches": ("Phi", {}, {"num_microbatches": 2}),
    "dp, tp": ("Qwen3", {"tp": 2}, {"recompute": True}),
    "dp, tp, 16 bits": ("Llama, 16 bits", {"tp": 2}, {}),
    "dp, tp, sp": ("Llama", {"tp": 2}, {"sequence_parallel": True}),
    "dp, pp": ("Mistral", {"pp": 2}, {}),
    "pp, tp": ("Phi", {"pp": 2, "tp": 2}, {"schedule": "gpipe"}),
    "pp, tp, sp": ("Gemma2", {"pp": 2, "tp": 2}, {"sequence_parallel": True}),
    "pp, recompute": ("Llama", {"pp": 4, "dp": 1}, {"recompute": True}),
    "fsdp": ("Qwen3", {"dp": 1, "fsdp": 4}, {"recompute": True}),
    "hsdp": ("Llama", {"dp": 2, "fsdp": 2}, {"num_microbatches": 2}),
    "fsdp, tp": ("Llama", {"dp": 1, "fsdp": 2, "tp": 2}, {}),
    "fsdp, pp": ("Mistral", {"dp": 1, "fsdp": 2, "pp": 2}, {}),
    "zero 1, pp": ("Llama", {"pp": 2}, {"zero_stage": 1}),
    "zero 2, tp, sp": ("Llama", {"tp": 2}, {"zero_stage": 2, "sequence_parallel": True}),
    "zero 2, scaled": ("Gemma2", {}, {"zero_stage": 2, "loss_scale": 1024.0}),
    "ep, edp": ("Mixtral", {"ep": 2}, {}),
    "ep, tp": ("Mixtral", {"ep": 2, "tp": 2}, {}),
    "ep, pp": ("Mixtral, one expert a token", {"ep": 2, "pp": 2}, {}),
    "ep, edp, zero 1": ("Mixtral", {"ep": 2}, {"zero_stage": 1}),
    "ep, zero 2": ("Mixtral", {"ep": 4}, {"zero_stage": 2, "num_microbatches": 2}),
    "ep, tp, zero 2": ("Mixtral", {"ep": 2, "tp": 2}, {"zero_stage": 2}),
    "ep, pp, zero 1": ("Mixtral, one expert a token", {"ep": 2, "pp": 2}, {"zero_stage": 1}),
    "ep, edp, fsdp": ("Mixtral", {"dp": 1, "fsdp": 4, "ep": 2}, {"clip_grad_norm": MAX_NORM}),
    "ep, hsdp": ("Mixtral", {"dp": 2, "fsdp": 2, "ep": 4}, {"num_microbatches": 2}),
    "ep, edp, hsdp, recompute": ("Mixtral", {"dp": 2, "fsdp": 2, "ep": 2}, {"recompute": True}),
    "ep, fsdp, tp": ("Mixtral", {"dp": 1, "fsdp": 2, "ep": 2, "tp": 2}, {}),
    "ep, fsdp, pp": ("Mixtral, one expert a token", {"dp": 1, "fsdp": 2, "ep": 2, "pp": 2}, {}),
    "tp, whole experts": ("Mixtral", {"tp": 2}, {}),
    "ep, edp, Qwen3": ("Qwen3Moe", {"ep": 2}, {}),
    "ep, tp, Qwen3": ("Qwen3Moe", {"ep": 2, "tp": 2}, {}),
    "ep, zero 2, Qwen3": ("Qwen3Moe", {"ep": 4}, {"zero_stage": 2, "recompute": True}),
    "ep, pp, zero 1, Qwen3": ("Qwen3Moe", {"ep": 2, "pp": 2}, {"zero_stage": 1}),
    "ep, tp, Qwen2": ("Qwen2Moe", {"ep": 2, "tp": 2}, {}),
    "ep, zero 1, Olmoe": ("Olmoe", {"ep": 2}, {"zero_stage": 1}),
    "ep, edp, DeepSeek": ("DeepseekV3", {"ep": 2}, {}),
    "fsdp, tp, whole experts": ("Mixtral", {"dp": 1, "fsdp": 2, "tp": 2}, {}),
    "pp, tp, whole experts": ("Mixtral", {"pp": 2, "tp": 2}, {}),
}


def make(kind: str = "Llama", seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    name = kind.split(",", maxsplit=1)[0]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **KINDS[kind], **options})
    return transformers.AutoModelForCausalLM.from_config(config)


def ids_of(step: int) -> Tensor:
    return torch.randint(67, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, LR)


def train_alone(kind: str) -> list[float]:
    model = make(kind)
    optimizer = optimizer_of(model.parameters())
    found = []
    for step in range(STEPS):
        loss = model(input_ids=ids_of(step), labels=ids_of(step)).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        apply_steps(optimizer)
        found += [float(loss.detach()), float(norm)]
    return found


def train_on_mesh(rank: int, name: str, device: str) -> list[float]:
    kind, sizes, options = CASES[name]
    dims = ParallelDims(**sizes, device_type=device)
    train = parallelize(make(kind).to(place(device, rank)), dims, optimizer_of, **options)
    batch = dims["batch"]
    num_rows, found = ROWS // batch.size(), []
    for step in range(STEPS):
        mine = ids_of(step).split(num_rows)[batch.get_local_rank()].to(place(device, rank))
        loss = train.step(mine, mine).reshape(1)
        dist.all_reduce(loss, dist.ReduceOp.AVG, group=batch.get_group())
        norm = train.clip_grad_norm_(MAX_NORM)
        apply_steps(train.optimizer)
        found += [float(loss), float(norm)]
    return found


# Each model and each axis of a mesh.
QUICK = (
    *(
        "dp, micro-batches",
        "dp, tp, 16 bits",
        "dp, pp",
        "pp, tp, sp",
        "fsdp",
        "hsdp",
        "zero 2, scaled",
    ),
    *("ep, pp", "ep, tp, zero 2", "ep, edp, fsdp", "tp, whole experts", "ep, tp, Qwen3"),
    *("ep, tp, Qwen2", "ep, zero 1, Olmoe", "ep, edp, DeepSeek"),
)


@pytest.mark.parametrize("name", quick(CASES, *QUICK))
def test_training_is_that_of_one_process(name: str, device: str) -> None:
    everyone = run_ranks(WORLD, train_on_mesh, name, device)
    expected = train_alone(CASES[name][0])
    for found in everyone:
        assert found == pytest.approx(expected, rel=2e-2 if "16 bits" in name else 2e-6), name


class Block(nn.Module):
    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        if group is not None:
            self.up = ColumnParallelLinear.from_linear(self.up, group=group)  # type: ignore[assignment]
            self.down = RowParallelLinear.from_linear(self.down, group=group)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def own_model(group: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(group) for _ in range(4)))


@pytest.mark.parametrize("sizes", [{"pp": 2, "tp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
@in_ranks(WORLD)
def test_a_model_with_parallel_layers_of_its_own(rank: int, sizes: dict[str, Any]) -> None:
    dims = ParallelDims(**sizes)
    model, alone = own_model(dims.group("tp") if dims.tp > 1 else None), own_model()
    train = parallelize(model, dims, optimizer_of, loss_fn=nn.functional.mse_loss)
    optimizer = optimizer_of(alone.parameters())
    torch.manual_seed(1)
    x, y = torch.randn(8, 12), torch.randn(8, 12)
    batch = dims["batch"]
    mine_x, mine_y = (t.chunk(batch.size())[batch.get_local_rank()] for t in (x, y))
    for _ in range(STEPS):
        loss = train.step(mine_x, mine_y).reshape(1)
        dist.all_reduce(loss, dist.ReduceOp.AVG, group=dims.group("batch"))
        apply_steps(train.optimizer)
        expected = train_step(nn.functional.mse_loss(alone(x), y), optimizer)
        assert float(loss) == pytest.approx(expected, rel=1e-5)
    expected = float(nn.functional.mse_loss(alone(x), y))
    assert float(train.evaluate(x, y)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("world_size", "sizes", "module"),
    [(2, {"tp": 2}, "Sequential"), slow(4, {"tp": 2, "pp": 2}, "StageModule")],
)
@in_ranks()
def test_dropout_between_layers_of_its_own(rank: int, sizes: Any, module: str) -> None:
    """https://github.com/ecmwf/anemoi-core/issues/595: dropout in a model that ranks share.

    https://github.com/tenstorrent/tt-metal/issues/55947: masks of one tensor group differ.
    """
    dims, x = ParallelDims(**sizes), torch.ones(8, 12)
    blocks = [nn.Sequential(block, nn.Dropout(0.3)) for block in own_model(dims.group("tp"))]
    loss_fn = nn.functional.mse_loss
    train = parallelize(nn.Sequential(*blocks), dims, optimizer_of, loss_fn=loss_fn)
    if dims.pp == 1:
        torch.manual_seed(3)
        train.step(x, x)
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match=f"draw different random numbers in a {module}"):
        train.step(x, x)


@in_ranks(WORLD)
def test_what_does_not_go_together_is_an_error_on_all_ranks(rank: int) -> None:
    def refused(text: str, sizes: dict[str, Any], model: Any, **options: Any) -> None:
        before = {name: param.clone() for name, param in model.named_parameters()}
        names = [type(module).__name__ for module in model.modules()]
        with pytest.raises((TypeError, ValueError), match=re.escape(text)):
            parallelize(model, ParallelDims(**sizes), optimizer_of, **options)
        assert [type(module).__name__ for module in model.modules()] == names
        assert all(p.is_meta or p.equal(before[n]) for n, p in model.named_parameters())

    llama, own = make("Llama"), own_model()
    fsdp, fsdp4 = {"dp": 1, "fsdp": 2}, {"dp": 2, "fsdp": 2}
    mse: dict[str, Any] = {"loss_fn": nn.functional.mse_loss}
    refused("ep is 2, but LlamaForCausalLM has neither stacked experts", {"ep": 2}, llama)
    refused("tp is 2, but Sequential has neither a tensor-parallel plan", {"tp": 2}, own, **mse)
    refused("pp is 2, but Block is neither an nn.Sequential", {"pp": 2}, Block(), **mse)
    refused("Sequential is not a model of transformers and has no loss: pass loss_fn", {}, own)
    refused("use dp instead of fsdp 2", {"dp": 2, "fsdp": 2}, llama, zero_stage=0)
    refused("zero_stage 3 shards over fsdp, which is 1", {}, llama, zero_stage=3)
    refused("zero_stage must be 0, 1, 2 or 3, got 4", {}, llama, zero_stage=4)
    refused(
        "num_microbatches must be a whole number, 1 or more; got 0", {}, llama, num_microbatches=0
    )
    refused("schedule must be one of gpipe", {}, llama, schedule="1f1B")
    split = own_model(ParallelDims(tp=2).group("tp"))
    for word in ("sequence_parallel", "gather_logits"):
        refused(f"{word}: for layers that parallelize() splits", {"tp": 2}, split, **{word: True},
            **mse)  # fmt: skip
    with pytest.raises(ValueError, match="several optimizers together are one of zero"):
        parallelize(llama, ParallelDims(tp=2), lambda params: [optimizer_of(params)])
    assert llama.model.layers[0].mlp.up_proj.out_features == make("Llama").config.intermediate_size
    refused("over the ranks of tp, which is 1", {}, llama, sequence_parallel=True)
    refused("sums gradients of norms", {**fsdp, "tp": 2}, llama, sequence_parallel=True)
    refused(
        "zero_stage=0 does not use zero.shard() and has no loss_scale", {}, llama, loss_scale=2.0
    )
    # What zero.shard() refuses, too.
    refused("parallelize() has no offload_weights", fsdp4, llama, offload_weights=True)
    refused(
        "reduce_dtype must be torch.float32 or the dtype of",
        fsdp4,
        llama,
        recompute=True,
        loss_scale=2.0,
        reduce_dtype=torch.float16,
    )
    refused("got an unexpected keyword argument 'bucket_byte'", {}, llama,
        bucket_byte=1)  # fmt: skip
    refused("gather_logits does not work in a pipeline", {"tp": 2, "pp": 2}, llama,
        gather_logits=True)  # fmt: skip
    refused("pass its `module` to parallelize", {}, nn.parallel.DistributedDataParallel(own), **mse)
    refused(
        "zero_stage=3 uses fully_shard and has no clip_grad_norm",
        {**fsdp, "pp": 2},
        llama,
        clip_grad_norm=1.0,
    )
    other = own_model() if rank else nn.Sequential(Block())
    refused("ranks disagree on the names, shapes and dtypes of parameters", {}, other, **mse)
    refused("ranks disagree on the options", {}, llama, num_microbatches=1 + rank)
    two = nn.ModuleList([Block(), Block().to("meta")])
    refused("the model is on cpu and meta: move it to one device", {"tp": 2}, two, **mse)
    # What tensor_parallelize and Pipeline refuse is asked at the start too.
    bert = transformers.BertConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8)
    refused("BertForMaskedLM has no pipeline plan of its modules in its config", {"pp": 2},
        transformers.BertForMaskedLM(bert))  # fmt: skip
    same: Any = own_model()
    same[1].up.weight.data = same[0].up.weight.data
    refused("in the same memory, which parallelize would train", {"pp": 2}, same, **mse)
    lazy = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(TypeError, match="run the model once before parallelize"):
        parallelize(lazy, ParallelDims(), optimizer_of, **mse)
    with pytest.raises(ValueError, match="ranks disagree on the problem of the arguments"):
        parallelize(lazy if rank else own, ParallelDims(), optimizer_of, **mse)
    refused("rank 0 has ValueError('zero_stage must be", {}, own,
        zero_stage=0 if rank else 4, **mse)  # fmt: skip
    refused("recompute=True is for the layers of", {}, Block(), recompute=True, **mse)
    with pytest.raises(TypeError, match="a dict of blocks is for a pipeline"):
        parallelize({"0": Block(), "1": Block()}, ParallelDims(), optimizer_of, **mse)
    refused("ranks disagree on the mesh", {"tp": 1 + rank % 2}, split, **mse)

    def of_rank(params: Any) -> Any:
        if rank == 0:
            raise RuntimeError("only here")
        return optimizer_of(params)

    def of_matrices(params: Any) -> Any:
        return torch.optim.SGD([param for param in params if param.dim() > 1], 0.1)

    with pytest.raises(ValueError, match=r"rank 0 has RuntimeError.*only here.*1 has None"):
        parallelize(own, ParallelDims(), of_rank, **mse)
    flat = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    with pytest.raises(ValueError, match=r"rank 3 has ValueError.*got an empty parameter"):
        parallelize(flat, ParallelDims(pp=4), of_matrices, **mse)


class _Copying(torch.optim.SGD):
    """Copies the weights when it is made, as one with float64 masters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        own = [param for group in self.param_groups for param in group["params"]]
        self.copies = {param: param.detach().double() for param in own}

    def step(self, closure: Any = None) -> Any:
        for param, copied in self.copies.items():
            assert param.grad is not None
            param.data.copy_(copied.sub_(param.grad, alpha=0.1))


@in_ranks(2)
def test_an_optimizer_that_copies_weights_has_those_of_rank_0(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(4, 4)

    def make(params: Any) -> _Copying:
        kinds = [[p for p in params if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)]
        return _Copying([{"params": kind} for kind in kinds], 0.1)

    train = parallelize(model, ParallelDims(dp=2), make, loss_fn=nn.MSELoss())
    assert train.optimizer.param_groups[1]["params"] == [model.bias]
    train.step(torch.ones(4, 4), torch.ones(4, 4))
    train.optimizer.step()
    theirs = model.weight.detach().clone()
    dist.broadcast(theirs, 0)
    assert torch.equal(theirs, model.weight)
