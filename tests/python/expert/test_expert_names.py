"""Checkpoints of mixtures of experts have the names of the model as it was, on every mesh.

Elsewhere the names depend on the mesh, and loading fails or is partial:
https://github.com/deepspeedai/DeepSpeed/issues/6589,
https://github.com/huggingface/nanotron/pull/107,
https://github.com/KempnerInstitute/KempnerForge/issues/202.
Or a checkpoint loads without an error, and its experts are random:
https://github.com/NVIDIA/Megatron-LM/issues/5844.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import quick
from full_states import full_weights, load_full_weights
from model_zoo import VOCAB, build, drop_nothing
from ranks import in_ranks, run_ranks
from steps import apply_steps, train_step
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as by_torchs
from torch.testing import assert_close

from ringcomm.integrations.transformers import expert_parallelize
from ringcomm.integrations.transformers.experts import is_stacked
from ringcomm.nn import MixtureOfExperts
from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import ParallelDims, get_state_dict, parallelize, set_state_dict

transformers = pytest.importorskip("transformers")
modeling_auto = pytest.importorskip("transformers.models.auto.modeling_auto")

FAMILY = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
KNOWN = ("mixtral", "deepseek_v3", "qwen2_moe", "qwen3_moe", "olmoe")
transformers.utils.logging.disable_progress_bar()
for _kind in KNOWN:  # imported before ranks are forked
    assert getattr(transformers, getattr(modeling_auto, FAMILY)[_kind])
MESHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ep": ({"ep": 2}, {}),
    "tp": ({"tp": 2}, {}),
    "ep, zero 1": ({"ep": 2}, {"zero_stage": 1}),
    "dp": ({}, {}),
    "ep, fsdp": ({"dp": 1, "fsdp": 2, "ep": 2}, {}),
    "pp": ({"pp": 2}, {}),
    "ep, zero 2": ({"ep": 2}, {"zero_stage": 2}),
    "fsdp": ({"dp": 1, "fsdp": 2}, {}),
}
# What tensor parallelism and pipelines do not support of some families.
REFUSED = r"plan has the style|no pipeline plan|cannot be split into a sequence of blocks"


def ids_of(step: int) -> Tensor:
    return torch.randint(3, VOCAB, (4, 9), generator=torch.Generator().manual_seed(step))


def adamw(params: Any) -> torch.optim.Optimizer:
    """A large eps, so that roundings of small gradients stay small."""
    return torch.optim.AdamW(params, 1e-2, eps=1e-2)


def step_alone(model: Any, optimizer: Any, step: int) -> None:
    """Of the mean over both halves of the rows."""
    losses = [model(input_ids=half, labels=half).loss for half in ids_of(step).chunk(2)]
    train_step(sum(losses) / 2, optimizer)


def step_on_mesh(train: Any, step: int) -> None:
    batch = train.dims["batch"]
    own = ids_of(step).chunk(batch.size())[batch.get_local_rank()]
    train.step({"input_ids": own, "labels": own})
    apply_steps(train.optimizer)


def compare(found: Any, model: Any, optimizer: Any) -> None:
    """With one process; weights that it does not use have no state there."""
    one: Any = by_torchs.get_state_dict(model, optimizer)
    values, state = one
    assert_close(found[0], dict(values), rtol=1e-3, atol=1e-4)
    assert found[1]["state"].keys() >= state["state"].keys()
    for name, of_weight in state["state"].items():
        assert_close(found[1]["state"][name], of_weight, rtol=1e-3, atol=1e-5)
    names = [[name for group in of["param_groups"] for name in group["params"]]
             for of in (found[1], state)]  # fmt: skip
    assert sorted(names[0]) == sorted(names[1])


def check_saved(
    model: Any, kind: Any, folder: Path, wanted: dict[str, Tensor], *, every_rank: bool
) -> None:
    """What transformers loads from save_pretrained(), which writes shards and an index."""
    if every_rank or dist.get_rank() == 0:
        model.save_pretrained(folder, max_shard_size="40KB")
    if dist.get_rank() == 0:
        assert (folder / "model.safetensors.index.json").exists()
        loaded, facts = kind.from_pretrained(folder, output_loading_info=True)
        assert not any(facts.values()), facts
        assert_close(dict(loaded.state_dict()), wanted, rtol=0, atol=0)
    dist.barrier()


def walk(rank: int, kind: str, folder: Path) -> list[str]:
    """From one process over all meshes to one process, with a step on each. Those that can."""
    model: Any = drop_nothing(build(FAMILY, kind))
    alone, optimizer = copy.deepcopy(model), adamw(model.parameters())
    optimizer = adamw(alone.parameters())
    try:
        step_alone(alone, optimizer, 0)
    except RuntimeError:  # such sizes are not for this family
        return []
    state: Any = copy.deepcopy(by_torchs.get_state_dict(alone, optimizer))
    done = []
    for step, (name, (sizes, options)) in enumerate(MESHES.items(), 1):
        num: dict[str, Any] = {"num_microbatches": 4} if "pp" in sizes else {}
        try:
            made = copy.deepcopy(model)
            train = parallelize(made, ParallelDims(**sizes), adamw, **options, **num)
        except (TypeError, ValueError) as error:
            if not re.search(REFUSED, str(error)):
                raise
            continue
        set_state_dict(train, train.optimizer, *state)
        step_on_mesh(train, step)
        step_alone(alone, optimizer, step)
        state = get_state_dict(train, train.optimizer, full=True)
        compare(state, alone, optimizer)
        if train.pipeline is None:
            given = train.model, type(alone), folder / kind / name, state[0]
            check_saved(*given, every_rank=name != "dp")
        done.append(name)
    own = adamw(model.parameters())
    by_torchs.set_state_dict(
        model, own, model_state_dict=state[0], optim_state_dict=copy.deepcopy(state[1])
    )
    for pair in ((model, own), (alone, optimizer)):
        step_alone(*pair, len(MESHES) + 1)
    compare(get_state_dict(model, own), alone, optimizer)
    return done


@pytest.mark.parametrize("kind", quick(KNOWN, *KNOWN[:2]))
def test_one_state_goes_over_all_meshes(kind: str, tmp_path: Path) -> None:
    for done in run_ranks(2, walk, kind, tmp_path, timeout_s=120.0):
        assert {*MESHES} - {*done} <= ({"pp", "tp"} if kind == "olmoe" else set())


@pytest.mark.slow
def test_one_state_of_each_family(tmp_path: Path) -> None:
    """Of all causal language models of transformers with experts that ranks can split."""
    found = {}
    for kind in getattr(modeling_auto, FAMILY):
        try:
            with torch.device("meta"):
                has_experts = any(map(is_stacked, build(FAMILY, kind).modules()))
        except Exception:  # no small configuration
            continue
        if has_experts:
            found[kind] = run_ranks(2, walk, kind, tmp_path, timeout_s=300.0)[0]
            print(kind, *found[kind], sep=", ", flush=True)
    assert len(found) > 30
    assert all("ep" in done for done in found.values() if done)
    assert sum(not done for done in found.values()) < 5


def mixtral(seed: int = 0, num_experts: int = 4) -> Any:
    torch.manual_seed(seed)
    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=num_experts,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize("stage", [0, 1])
@in_ranks(4)
def test_ranks_without_experts(rank: int, stage: int, tmp_path: Path) -> None:
    """Three experts on four ranks: the fourth has empty parts, and states as the others."""
    dims, alone = ParallelDims(ep=4), mixtral(0, 3)
    optimizer = adamw(alone.parameters())
    train, again = (parallelize(mixtral(seed, 3), dims, adamw, zero_stage=stage) for seed in (0, 1))
    step_on_mesh(train, 0)
    step_alone(alone, optimizer, 0)
    compare(get_state_dict(train, train.optimizer, full=True), alone, optimizer)
    values, state = get_state_dict(train, train.optimizer)
    dcp.save({"model": values, "optimizer": state}, checkpoint_id=tmp_path)
    values, state = get_state_dict(again, again.optimizer)
    dcp.load({"model": values, "optimizer": state}, checkpoint_id=tmp_path)
    set_state_dict(again, again.optimizer, values, state)
    step_on_mesh(again, 1)
    step_alone(alone, optimizer, 1)
    compare(get_state_dict(again, again.optimizer, full=True), alone, optimizer)
    with pytest.raises(RuntimeError, match=r"experts\.gate_up_proj, which is split unevenly"):
        expert_parallelize(mixtral(0, 6)).state_dict()
    with pytest.raises(ValueError, match=r"empty on some rank.* fewer .* expert-parallel ranks"):
        parallelize(mixtral(0, 3), ParallelDims(dp=1, fsdp=4, ep=4), adamw)


@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
@in_ranks(2)
def test_updates_in_the_backward_pass(rank: int, kind: Any) -> None:
    """AdaLomo's factors of the stacked weight are those of one process; uneven parts."""
    alone, sharded, again = mixtral(0, 3), *(expert_parallelize(mixtral(i, 3)) for i in (0, 1))
    of_one = kind(alone, 1e-2, group="none")
    of_ranks, other = (kind(model, 1e-2, group=dist.group.WORLD) for model in (sharded, again))

    def step_own(model: Any, optimizer: Any, step: int) -> None:
        own = ids_of(step).chunk(2)[rank]
        train_step(model(input_ids=own, labels=own).loss, optimizer)

    step_alone(alone, of_one, 0)
    step_own(sharded, of_ranks, 0)
    state = get_state_dict(alone, of_one, full=True)
    found = get_state_dict(sharded, of_ranks, full=True)
    assert_close(found[0], state[0], rtol=1e-3, atol=1e-5)
    assert_close(found[1]["state"], state[1]["state"], rtol=1e-3, atol=1e-6)
    set_state_dict(again, other, *state)
    step_own(again, other, 1)
    step_alone(alone, of_one, 1)
    assert_close(full_weights(again), dict(alone.state_dict()), rtol=1e-3, atol=1e-5)


@in_ranks(2)
def test_other_ways_of_saving(rank: int, tmp_path: Path) -> None:
    model, again = expert_parallelize(mixtral()), expert_parallelize(mixtral(1))
    wanted = full_weights(model)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    found = {name: torch.zeros_like(value) for name, value in wanted.items()}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert_close(found, wanted, rtol=0, atol=0)
    for values in (wanted, model.state_dict()):
        load_full_weights(again, full_weights(expert_parallelize(mixtral(2))))
        again.load_state_dict(values)
        assert_close(full_weights(again), wanted, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="is the part of one rank"):
        torch.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.raises(RuntimeError, match=r"load_state_dict\(assign=True\) would drop"):
        again.load_state_dict(wanted, assign=True)
    with pytest.raises(RuntimeError, match="this rank's part of the optimizer's"):
        by_torchs.get_state_dict(model, adamw(model.parameters()))
    with pytest.raises(ValueError, match="has no stacked experts"):
        expert_parallelize(model)
    # Names of single experts are those of older checkpoints, and of files of save_pretrained().
    name = "model.layers.0.mlp.experts.down_proj"
    single = {f"{name[:-9]}{idx}.down_proj": value for idx, value in enumerate(wanted[name])}
    for values in ({**wanted, name: wanted[name][:2]}, {**wanted, **single}):
        with pytest.raises(ValueError, match=r"must have shape \(4, 32, 48\)|experts\.0\.down_"):
            set_state_dict(again, None, values)
    part = {name: mixtral(3).state_dict()[name]}
    set_state_dict(again, None, part, strict=False)
    assert_close(full_weights(again), {**wanted, **part}, rtol=0, atol=0)


class Hub(nn.Module):
    """With a method of huggingface_hub, and a layer that was made for ranks."""

    def __init__(self, dims: ParallelDims) -> None:
        super().__init__()
        self.moe = MixtureOfExperts(4, lambda: nn.Linear(4, 4), 3, mesh=dims["ep"])

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)

    def save_pretrained(self, folder: Path) -> None:
        torch.save(self.state_dict(), folder / "hub.pt")


@in_ranks(2)
def test_what_saves_around_experts(rank: int, tmp_path: Path) -> None:
    """A layer of ringcomm.nn has the names that it was made with; PEFT saves its adapter once."""
    dims = ParallelDims(ep=2)
    train = parallelize(Hub(dims), dims, adamw, loss_fn=nn.functional.mse_loss)
    train.model.save_pretrained(tmp_path)
    wanted = full_weights(train.model)
    assert {f"moe.experts.{idx}.bias" for idx in range(3)} < wanted.keys()
    assert_close(torch.load(tmp_path / "hub.pt"), wanted, rtol=0, atol=0)
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    train = parallelize(peft.get_peft_model(mixtral(), lora), dims, adamw)
    train.model.save_pretrained(tmp_path / "peft")
    values = full_weights(train.model)
    loaded = peft.PeftModel.from_pretrained(mixtral(), tmp_path / "peft").state_dict()
    assert_close(dict(loaded), values, rtol=0, atol=0)
    lora = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.gate_up_proj"])
    with pytest.raises(ValueError, match="of PEFT, adapts the stacked weights of all experts"):
        parallelize(peft.get_peft_model(mixtral(), lora), dims, adamw)


@in_ranks(2)
def test_optimizers_of_whole_weights_are_refused(rank: int) -> None:
    """This rank's rows are a part of the stacked weight."""
    for stage in (0, 1, 2):
        with pytest.raises(TypeError, match=r"would split .*experts\.gate_up_proj"):
            parallelize(mixtral(), ParallelDims(ep=2), torch.optim.Adafactor, zero_stage=stage)
    model = expert_parallelize(mixtral())
    train_step(model(input_ids=ids_of(0), labels=ids_of(0)).loss, adamw(model.parameters()))
    with pytest.raises(TypeError, match="Adafactor needs full weights"):
        torch.optim.Adafactor(model.parameters()).step()
