"""Private names of torch: gathered in two files of the package, and there in the running torch."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeGuard

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from ringcomm import _extension, torch_names

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "ringcomm"
GATHERED = {PACKAGE / "torch_names.py", PACKAGE / "parallel" / "pipeline" / "torch_stage.py"}

TENSOR = ("_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks")
MODULE = ("_modules", "_forward_hooks", "_forward_pre_hooks", "_apply", "_compiled_call_impl")
# Of named tuples, sys, transformers, Accelerate and vLLM.
OF_OTHERS = {"_fields", "_replace", "_attn_implementation", "_current_frames", "_mixed_mesh_grads"}
OF_OTHERS |= {"_prepare_backend", "_apply_gate", "_default_apply_gate", "_CPUSHMDistributed"}
# Strings that are no names of torch: suffixes, and attributes that ringcomm adds to tensors.
OWN_STRINGS = {"_bytes", "_col", "_rate", "_ratio", "_update_"}
OWN_STRINGS |= {"_ringcomm_averaged", "_ringcomm_summed_over"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def private(text: str) -> bool:
    return any(re.match("_(?!_)", part) for part in text.split("."))


def is_name(value: Any) -> TypeGuard[str]:
    """Whether a constant is a string that may name something, such as "_apply" or "torch._C"."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.]*", value) is not None


def names_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of private names that code imports of torch, reads of an object, or spells."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in whole if private(name))
        elif isinstance(node, ast.Import):
            whole = [alias.name for alias in node.names]
            yield from ((node.lineno, x) for x in whole if x.startswith("torch.") and private(x))
        elif isinstance(node, ast.Attribute) and private(node.attr):
            # super(): methods that nn.Module documents for overriding.
            if ast.unparse(node.value) not in ("self", "cls", "super()"):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and is_name(node.value) and private(node.value):
            yield node.lineno, node.value


def is_stored_in_self(node: ast.Attribute) -> bool:
    owner = node.value
    return isinstance(node.ctx, ast.Store) and isinstance(owner, ast.Name) and owner.id == "self"


def own_names() -> set[str]:
    """The private names that the package itself defines."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)  # at the top, or in a class
            elif isinstance(node, ast.Attribute) and is_stored_in_self(node):
                found.add(node.attr)
    return found


@cache
def allowed_names() -> set[str]:
    own = own_names() | {"_C", "_cuda", "_kernels"}
    # Also names of the package, where its own classes have them.
    of_torch = {name for kind in (torch.Tensor, nn.Module()) for name in dir(kind)}
    return own - of_torch | OF_OTHERS | OWN_STRINGS


def names_of_torch(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, name) of each private name of torch."""
    found = []
    for line, name in names_in(tree):
        is_torchs = name.startswith(("torch.", "dist."))
        if is_torchs or name.rpartition(".")[2] not in allowed_names():
            found.append((line, name))
    return found


def test_private_names_of_torch_are_gathered() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted({*PACKAGE.rglob("*.py")} - GATHERED)
        for line, name in names_of_torch(parsed(path))
    ]
    text = "\n".join(found)
    assert not found, f"private names of torch; put them into ringcomm/torch_names.py:\n{text}"


@pytest.mark.parametrize(
    "code",
    [
        "from torch._utils import _take_tensors",
        "import torch._dynamo",
        "from torch import _C",
        "torch._C._current_graph_task_id()",
        "torch._foreach_add_(tensors, 1)",
        "dist.distributed_c10d._world.pg_map",
        "torch.autograd.graph._allow_mutation_on_saved_tensors_enabled",
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset(*args)",
        "tensor._version",
        "module._modules",
        "module._buffers[name] = tensor",
        'getattr(group, "_get_backend")(device)',
        'vars(module).pop("_apply", None)',
        'replace(torch.amp.GradScaler, "_unscale_grads_", check)',
        'find("torch.distributed.tensor._utils")',
    ],
)
def test_a_private_name_is_found(code: str) -> None:
    assert names_of_torch(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "self._modules",
        "from ringcomm import _C",
        "axes._replace(groups=())",
        "tensor.__class__",
        "dist.get_process_group_ranks(group)",
        'message = "call torch._C._current_graph_task_id() instead"',
    ],
)
def test_other_names_are_not_found(code: str) -> None:
    assert not names_of_torch(ast.parse(code))


def test_one_file_asks_the_engine_for_its_backward_pass() -> None:
    of_engine = {"graph_task", "NO_GRAPH_TASK", "queue_callback", "running_node", "keeps_graph"}
    of_engine |= {"will_run"}
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and node.module == "ringcomm.torch_names"
        if of_engine & {alias.name for alias in node.names}
    }
    users |= {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch_names"
        if node.attr in of_engine
    }
    assert users == {"backward_pass.py"}


def test_no_other_file_overrides_private_methods_of_stages() -> None:
    of_torch = {name for base in PipelineStage.__mro__ for name in vars(base) if private(name)}
    for path in {*(PACKAGE / "parallel" / "pipeline").glob("*.py")} - GATHERED:
        functions = [n.name for n in ast.walk(parsed(path)) if isinstance(n, ast.FunctionDef)]
        assert not of_torch & set(functions), path


def is_reached(name: str) -> bool:
    """Whether the running torch has a dotted name."""
    head, _, rest = name.partition(".")
    try:
        attrgetter(rest)({"torch": torch, "dist": dist}[head])
    except AttributeError:
        return False
    return True


# By what they are in.
NAMES_BY_OWNER = {
    "torch": (
        "_check _disable_dynamo"
        " _foreach_add_ _foreach_copy_ _foreach_div_ _foreach_mul_ _foreach_norm"
    ),
    "torch.Tensor": "_make_wrapper_subclass",
    "torch._C": (
        "_are_functorch_transforms_active _autograd._get_current_graph_task_keep_graph"
        " _autograd._top_saved_tensors_default_hooks"
        " _current_autograd_node _current_graph_task_id _disabled_torch_function_impl"
        " _dynamo.eval_frame.get_eval_frame_callback _will_engine_execute_node"
    ),
    "torch._subclasses.fake_tensor": "FakeTensor FakeTensorMode",
    "torch._utils": "_take_tensors",
    "torch.amp.GradScaler": "_unscale_grads_",
    "torch.autograd": "forward_ad._current_level Variable._execution_engine.queue_callback",
    "torch.autograd.graph": "_allow_mutation_on_saved_tensors_enabled",
    "torch.distributed.algorithms": "_checkpoint.checkpoint_wrapper.ActivationWrapper",
    "torch.distributed.checkpoint.state_dict": "_get_optim_state_dict",
    "torch.distributed.tensor": "_utils.compute_local_shape_and_global_offset",
    "torch.multiprocessing": "_prctl_pr_set_pdeathsig",
    "torch.nn.modules.module": "_EXTRA_STATE_KEY_SUFFIX",
    "torch.nn.parallel.DistributedDataParallel": (
        "_get_active_ddp_module _set_params_and_buffers_to_ignore_for_model"
    ),
    "torch.nn.utils.clip_grad": "_get_total_norm",
    "torch.ops": "_c10d_functional.all_reduce aten._to_copy aten._unsafe_view",
    "torch.utils": ("_python_dispatch.TorchDispatchMode _pytree.tree_leaves _pytree.tree_map_only"),
    "dist": "Backend._plugins _broadcast_coalesced c10d_logger._c10d_logger",
    "dist.ProcessGroup": "_device_types _get_backend set_timeout",
    "dist.ProcessGroupGloo": " ".join([*torch_names.GLOO_STATICS, torch_names.SET_DEFAULT_TIMEOUT]),
    "dist.ProcessGroupGloo._Options": " ".join(torch_names.GLOO_OPTIONS),
    "dist.device_mesh.DeviceMesh": "_flatten _get_root_mesh",
    "dist.distributed_c10d": (
        "_DistributedBackendOptions _new_process_group_helper _resolve_process_group"
        " _set_pg_timeout _update_default_pg _world.pg_group_ranks _world.pg_map"
    ),
}
IN_TORCH = [f"{owner}.{x}" for owner, names in NAMES_BY_OWNER.items() for x in names.split()]
# Found on objects, which the test below makes.
ON_OBJECTS = {
    *("_cdata", "_timeout", "_module_parameters", "_ddp_params_and_buffers_to_ignore"),
    *("_ddp_ignored", "_get_fsdp_state", "_unsharded_param", "_spec", "_record_post_forward"),
    *("_opt_called", "_zero_grad_profile_name", "_optimizer_", "_hooks"),
    *("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"),
}
# Of older versions of torch, which torch_stage.py and torch_names.py ask for by version.
OF_VERSIONS = {
    *("_fsdp_param_group", "_fsdp_param_groups"),
    *("_prepare_forward_infra", "_prepare_backward_infra", "_get_init_p2p_neighbors_ops"),
    *("_create_grad_recv_info", "_create_grad_send_info"),
}


def test_every_gathered_name_is_checked() -> None:
    known = {name.rpartition(".")[2] for name in IN_TORCH}
    known |= {*TENSOR, *MODULE}
    known |= {part for name in IN_TORCH for part in name.split(".")} | ON_OBJECTS | OF_VERSIONS
    used = {
        part
        for path in GATHERED
        for _, name in names_in(parsed(path))
        for part in re.findall(r"\b_(?!_)\w+", name)
    }
    unknown = used - known - {"_aten", "_c10d", "_ddp", "_utils", "_C", "_cuda", "_kernels"}
    assert not unknown, f"not in IN_TORCH, ON_OBJECTS or OF_VERSIONS of this file: {unknown}"


def test_the_running_torch_has_every_name() -> None:
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.tensor._utils
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE

    gone = [name for name in IN_TORCH if not is_reached(name)]
    tensor, module = torch.ones(1), nn.Linear(1, 1)
    gone += [f"Tensor.{name}" for name in TENSOR if not hasattr(tensor, name)]
    gone += [f"nn.Module.{name}" for name in MODULE if not hasattr(module, name)]
    if not hasattr(tensor.untyped_storage(), "_cdata"):
        gone.append("UntypedStorage._cdata")
    optimizer: Any = torch.optim.SGD(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    names = ["_opt_called", "_zero_grad_profile_name", "_optimizer_step_pre_hooks"]
    names += ["_optimizer_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"]
    gone += [f"Optimizer.{name}" for name in names if not hasattr(optimizer, name)]
    wrapped = {"_orig_mod": torch.compile(module)}
    wrapped["_checkpoint_wrapped_module"] = checkpoint_wrapper(module)
    gone += [name for name, wrapper in wrapped.items() if not hasattr(wrapper, name)]
    if FSDP_WRAPPED_MODULE != "_fsdp_wrapped_module":
        gone.append("FullyShardedDataParallel._fsdp_wrapped_module")
    stage = {name for base in PipelineStage.__mro__ for name in vars(base)}
    gone += [f"PipelineStage.{name}" for name in sorted(OF_VERSIONS - stage) if "infra" in name]
    assert not gone, f"torch {torch.__version__} has no {', '.join(gone)}: see torch_names.py"


@in_ranks(2)
def test_objects_have_the_names(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    gone = []
    if not hasattr(torch_names.backend_of(group, torch.device("cpu")).options, "_timeout"):
        gone.append("Backend.Options._timeout")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    torch_names.ignore_in_ddp(model, ["1.weight", "1.bias"])
    if torch_names.ignored_in_ddp(model) != ["1.weight", "1.bias"]:
        gone.append("_ddp_params_and_buffers_to_ignore")
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda *_: seen.append(torch_names.active_ddp()))
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(1, 2))
    if seen != [ddp]:
        gone.append("DistributedDataParallel._get_active_ddp_module")
    params = {id(param) for param in torch_names.params_of_ddp(ddp)}
    if params != {id(param) for param in model[0].parameters()}:
        gone.append("DistributedDataParallel._module_parameters")
    if not torch_names.is_ignored_in_ddp(model.get_parameter("1.weight")):
        gone.append("Parameter._ddp_ignored")
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("a", "b"))
    assert torch_names.flat_mesh(mesh).size() == dist.get_world_size()
    assert torch_names.root_mesh(mesh["b"]) == mesh
    unit: Any = fully_shard(nn.Linear(4, 4), mesh=mesh["b"])
    gone += [
        "FSDPParamGroup._record_post_forward"
        for group in torch_names.fsdp_groups(unit)
        if not hasattr(type(group), "_record_post_forward")
    ]
    unit(torch.ones(1, 4)).sum().backward()
    for param in (param for params in torch_names.fsdp_params(unit) for param in params):
        names = ("_unsharded_param", "unsharded_accumulated_grad", "sharded_param", "reduce_dtype")
        gone += [f"FSDPParam.{name}" for name in names if not hasattr(param, name)]
    assert len(torch_names.fsdp_params(unit)[0]) == 2
    alike = torch_names.like_dtensor(unit.weight, torch.ones(2, 4))
    assert (alike.shape, alike.placements) == (unit.weight.shape, unit.weight.placements)
    assert not gone, f"torch {torch.__version__} has no {', '.join(gone)}: see torch_names.py"


def test_an_untried_torch_is_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rank 0 of a job, and by a program without ranks."""
    monkeypatch.delenv("RANK", raising=False)
    importlib.reload(_extension)
    monkeypatch.setattr(torch_names, "NEWEST_TRIED", (2, 10))
    with pytest.warns(UserWarning, match=r"tried with torch up to 2\.10, .* install torch 2\.10"):
        importlib.reload(_extension)
    monkeypatch.setenv("RANK", "1")
    importlib.reload(_extension)
