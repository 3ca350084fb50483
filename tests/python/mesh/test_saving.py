"""What other ways of saving write of a sharded model: what one process writes, or an error."""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import in_ranks
from steps import train_step
from test_trainer_ranks import ENV
from torch import Tensor, nn
from torch.testing import assert_close

from ringcomm.nn import ColumnParallelLinear, MixtureOfExperts
from ringcomm.parallel import get_state_dict, offload, pipeline, zero
from ringcomm.parallel.flat_collectives import with_own_storage

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


class Net(nn.Sequential):
    """With the method that transformers, peft and huggingface_hub give to models."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 64), nn.Linear(64, 4))

    def save_pretrained(self, folder: Path, is_main_process: bool = True) -> str:
        torch.save(self.state_dict(), folder / "model.pt")
        return "saved"


class Around(nn.Module):
    """A module of a trainer, which saves the model in it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def made(system: str) -> tuple[Any, Any]:
    """What is sharded, and the model in it, after a step."""
    around: Any = Around() if system == "zero 3" else Net()
    net = around.net if system == "zero 3" else around
    if system == "pipeline":
        mean = lambda y, _: y.square().mean()  # noqa: E731
        pipe = pipeline.Pipeline(net, mean, num_microbatches=2, count_items=len)
        pipe.step(torch.ones(2, 64), torch.ones(2, 64))
        return pipe, pipe.module
    if system == "experts":
        net[3] = MixtureOfExperts(64, lambda: nn.Linear(64, 64), 4)
        return net, net
    if system == "tensor":
        net[2] = ColumnParallelLinear.from_linear(net[2], gather_output=True)
        return around, net
    if "infinity" in system:
        adamw = offload.Offloaded(torch.optim.AdamW(around.parameters(), 0.01), to="cpu")
        optimizer: Any = zero.shard(around, adamw, 3, offload_weights=True)
    else:
        optimizer = zero.shard(around, torch.optim.AdamW(around.parameters(), 0.01), int(system[5]))
    train_step(around(torch.ones(2, 64)).sum(), optimizer)
    if "closed" in system:
        optimizer.close()
    return around, net


def saved(net: Net, way: str, folder: Path) -> dict[str, Any]:
    """The state that a way of saving has written on this rank, read again."""
    file = io.BytesIO()
    if way == "torch.save":
        torch.save(net.state_dict(), file)
    elif way == "a part":
        *_, (last, part) = net.named_children()
        torch.save(part.state_dict(), file)
        assert len(file.getvalue()) < 4 * (64 * 32 + 32) + 4096  # not the whole bucket
        file.seek(0)
        return {f"{last}.{name}": value for name, value in torch.load(file).items()}
    elif way == "snapshot":  # also loaded again, as after the best of several epochs
        net.load_state_dict(values := copy.deepcopy(net.state_dict()))
        torch.save(values, file)
    elif way == "copy":
        return copy.deepcopy(net).state_dict()
    elif way == "pickle":
        loaded: Any = pickle.loads(pickle.dumps(net))
        return loaded.state_dict()
    elif way == "safetensors":
        safetensors.save_model(net, path := str(folder / f"{time.time()}"))
        return safetensors.load_file(path)
    elif way == "safetensors' dict":
        safetensors.save_file(net.state_dict(), path := str(folder / f"{time.time()}"))
        return safetensors.load_file(path)
    elif way == "hub":
        (own := folder / f"{dist.get_rank()}").mkdir()
        pytest.importorskip("huggingface_hub").save_torch_model(net, own)
        return safetensors.load_file(own / "model.safetensors")
    else:
        done = net.save_pretrained(folder)
        dist.barrier()
        assert done == ("saved" if way == "one rank" or dist.get_rank() == 0 else None)
        return torch.load(folder / "model.pt")
    file.seek(0)
    return torch.load(file, weights_only=False)


FREED = r"get_state_dict\(\)"
COPY = r"sharded weights cannot be copied or pickled.*get_state_dict\(model, full=True\)"
PART = r"is the part of one rank.*ringcomm\.parallel\.get_state_dict\(model, full=True\)"
WAYS = (
    "copy",
    "pickle",
    "a part",
    "torch.save",
    "snapshot",
    "safetensors",
    "safetensors' dict",
    "hub",
)
REFUSED: dict[str, tuple[str, ...]] = {
    "zero 1": ("",) * 8,
    "zero 2": ("",) * 8,
    "zero 3": (COPY, COPY, *(PART,) * 6),
    "infinity": (COPY, COPY, *(FREED,) * 6),
    "infinity, closed": ("",) * 8,
    "tensor": (COPY, COPY, "", *(PART,) * 5),
    "pipeline": (COPY, COPY, "", *(PART,) * 5),
    "experts": (COPY, COPY, *(PART,) * 6),
}


@pytest.mark.parametrize("system", REFUSED)
@in_ranks(2)
def test_each_way_writes_what_one_process_writes(rank: int, system: str, tmp_path: Path) -> None:
    _, net = made(system)
    wanted, _ = get_state_dict(net, full=True)
    for way, refused in zip(WAYS, REFUSED[system], strict=True):
        if refused:
            with pytest.raises(RuntimeError, match=refused):
                saved(net, way, tmp_path)
            continue
        found = saved(net, way, tmp_path)
        assert way == "a part" or len(found) == len(wanted), way
        assert_close(found, {name: wanted[name] for name in found}, rtol=0, atol=0)
    assert_close(get_state_dict(net, full=True)[0], wanted, rtol=0, atol=0)
    if system in ("zero 3", "tensor", "pipeline"):  # experts have names of torch's own on each rank
        checkpointed(net, wanted, tmp_path)
    # Others are saved by tensor_parallelize(): tests of transformers.
    if system not in ("tensor", "pipeline", "experts"):
        # Without shards each rank saves by itself, as it did before.
        alone = "closed" in system or system in ("zero 1", "zero 2")
        folder = tmp_path / str(rank) if alone else tmp_path
        folder.mkdir(exist_ok=True)
        found = saved(net, "one rank" if alone else "save_pretrained", folder)
        assert_close(found, wanted, rtol=0, atol=0)
        assert "state_dict" not in vars(net)


def checkpointed(net: Net, wanted: dict[str, Tensor], folder: Path) -> None:
    """torch.distributed.checkpoint writes what state_dict() has, now and in the background."""
    dcp.save(net.state_dict(), checkpoint_id=folder / "now")
    group = dist.new_group(backend="gloo")
    later: Any = folder / "later"
    saving: Any = dcp.async_save(net.state_dict(), checkpoint_id=later, process_group=group)
    saving.result()
    for name in ("now", "later"):
        found = {key: torch.zeros_like(value) for key, value in wanted.items()}
        dcp.load(found, checkpoint_id=folder / name, no_dist=True)
        assert_close(found, wanted, rtol=0, atol=0)


def test_a_part_with_its_own_storage() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        buffer = torch.arange(10, dtype=dtype)
        part = with_own_storage(buffer[2:8].view(2, 3))
        assert part.untyped_storage().nbytes() == part.nbytes == 6 * dtype.itemsize
        assert (part.data_ptr(), part.stride()) == (buffer[2:].data_ptr(), (3, 1))
        buffer += 1
        assert_close(part, buffer[2:8].view(2, 3), rtol=0, atol=0)
        del buffer
        assert part.sum() == sum(range(3, 9))
    assert with_own_storage(torch.ones(4)[2:2].view(0, 3)).shape == (0, 3)
    assert with_own_storage(torch.ones(1, 8)[:1]).stride() == (8, 1)


@in_ranks(2)
def test_states_of_stages_1_and_2_have_their_own_storages(rank: int) -> None:
    for stage, dtype in ((1, torch.float32), (2, torch.bfloat16)):
        net = nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 3)).to(dtype)
        optimizer = zero.shard(net, torch.optim.AdamW(net.parameters()), stage)
        for _ in range(2):
            train_step(net(torch.ones(2, 3, dtype=dtype)).sum(), optimizer)
        for state in optimizer.state.values():
            assert ("master" in state) == (dtype == torch.bfloat16)
            for value in state.values():
                assert value.untyped_storage().nbytes() == value.nbytes
        net[0].share_memory()
        with pytest.raises(
            ValueError, match=r"moved after .*torch\.multiprocessing moves .*so send clones"
        ):
            optimizer.step()


def save_by_trainer(transformers: Any, config: Any, folder: Path) -> None:
    """Trainer.save_model() on all ranks, of which only rank 0's Trainer saves."""
    from ringcomm.integrations.transformers import register

    register()
    model = transformers.LlamaForCausalLM(config)
    args = transformers.TrainingArguments(
        str(folder), max_steps=1, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True
    )
    ids = torch.ones(6, dtype=torch.long)
    rows = [{"input_ids": ids, "labels": ids}] * 16
    trainer = transformers.Trainer(model, args, train_dataset=rows)
    trainer.optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), 0.1), 3)
    trainer.train()
    wanted, _ = get_state_dict(model, full=True)
    trainer.save_model(str(folder / "trainer"))
    dist.barrier()
    fresh = transformers.LlamaForCausalLM.from_pretrained(folder / "trainer")
    assert_close(dict(fresh.state_dict()), wanted, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="PEFT is not installed")
@in_ranks(2, env=ENV, timeout_s=180.0)
def test_transformers_and_peft_save_sharded_models(rank: int, tmp_path: Path) -> None:
    """With tied weights, an adapter, and through Trainer."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )

    def sharded(system: str, model: Any) -> Any:
        params = [param for param in model.parameters() if param.requires_grad]
        if system == "infinity":
            return zero.shard(
                model, offload.Offloaded(torch.optim.SGD(params, 0.1)), 3, offload_weights=True
            )
        optimizer = zero.shard(model, torch.optim.SGD(params, 0.1), 3)
        ids = torch.ones(2, 6, dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        return optimizer

    for system in ("zero 3", "infinity"):
        torch.manual_seed(0)
        model: Any = transformers.LlamaForCausalLM(config)
        sharded(system, model)
        wanted, _ = get_state_dict(model, full=True)
        model.save_pretrained(folder := tmp_path / system)
        fresh = transformers.LlamaForCausalLM.from_pretrained(folder)
        assert_close(dict(fresh.state_dict()), wanted, rtol=0, atol=0)
        assert fresh.config.architectures == ["LlamaForCausalLM"]
    save_by_trainer(transformers, config, tmp_path)
    import peft

    model = transformers.LlamaForCausalLM(config)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, lora)
    sharded("zero 3", model)
    wanted, _ = get_state_dict(model, full=True)
    model.save_pretrained(tmp_path / "peft")
    loaded = peft.PeftModel.from_pretrained(
        transformers.LlamaForCausalLM(config), tmp_path / "peft"
    )
    adapter = {name: value for name, value in wanted.items() if "lora" in name}
    assert len(adapter) == 4
    assert_close({k: loaded.state_dict()[k] for k in adapter}, adapter, rtol=0, atol=0)
