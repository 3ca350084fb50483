from __future__ import annotations
import random
import emugpu, emulated_gpu, pytest, torch
import torch.distributed as dist
from emulated_gpu import in_emulated_ranks
from gpu_ranks import meet
from test_peer_allocations import GPU
import ringcomm

def fuzz(rank, seed, groups_n=2):
    shared = random.Random(seed); own = random.Random(1000 * seed + rank)
    world = dist.get_world_size()
    groups = [None, dist.new_group(list(range(world)))]
    kept: list = []
    for step in range(120):
        # own allocations, frees, cache drops: differ by rank
        act = own.random()
        if act < 0.35: kept.append(torch.empty(own.choice([1 << 18, 1 << 19, 3 << 18, 1 << 20, 5 << 19, 300_000]), dtype=torch.int32, device=GPU))
        if act > 0.75 and kept: kept.pop(own.randrange(len(kept)))
        if own.random() < 0.15: emugpu.empty_cache()
        if own.random() < 0.05: ringcomm.release(0)
        n = shared.choice([200_000, 1 << 18, 400_000, 262_143, 700_001]); kind = shared.choice(["all_reduce", "gather", "scatter", "broadcast"]); g = groups[shared.randrange(2)]
        fits = [k for k in kept if k.numel() >= n]
        def place(m):
            ok = [k for k in kept if k.numel() >= m + 8]
            if ok and own.random() < 0.8:
                t = own.choice(ok); o = own.randrange(0, t.numel() - m + 1) if own.random() < .6 else 0
                return t[o:o + m]
            return torch.empty(m, dtype=torch.int32, device=GPU)
        base = (torch.arange(n) % 977 + step).to(torch.int32)
        if kind == "all_reduce":
            t = place(n); t.copy_(base * (rank + 1)); emugpu.synchronize(); dist.all_reduce(t, group=g); want = base * (world * (world + 1) // 2)
        elif kind == "gather":
            m = n // world; i = torch.empty(m, dtype=torch.int32, device=GPU); i.copy_(base[:m] * (rank + 1)); t = place(m * world) if not kept else place(m * world)
            emugpu.synchronize(); dist.all_gather_into_tensor(t, i, group=g); want = torch.cat([base[:m] * (r + 1) for r in range(world)])
        elif kind == "scatter":
            m = n // world; i = place(m * world); i.copy_(base[:m * world] * (rank + 1)); emugpu.synchronize(); t = torch.empty(m, dtype=torch.int32, device=GPU); dist.reduce_scatter_tensor(t, i, group=g); want = base[m * rank:m * (rank + 1)] * (world * (world + 1) // 2)
        else:
            src = step % world; t = place(n); t.copy_(base * (rank + 1)); emugpu.synchronize(); dist.broadcast(t, src, group=g); want = base * (src + 1)
        assert torch.equal(t.cpu(), want), (seed, step, kind, n)
    s = ringcomm.stats(); print("stats", s, flush=True) if rank == 0 else None

@pytest.mark.parametrize("seed", range(6))
@in_emulated_ranks(2, env={"RINGCOMM_EMULATOR_PIECES": "1"}, fresh=True)
def test_fuzz(rank, seed): fuzz(rank, seed)
@pytest.mark.parametrize("seed", range(6, 8))
@in_emulated_ranks(3, env={"RINGCOMM_EMULATOR_PIECES": "1"}, fresh=True)
def test_fuzz3(rank, seed): fuzz(rank, seed)
@pytest.mark.parametrize("seed", range(8, 10))
@in_emulated_ranks(2, env=[{"RINGCOMM_EMULATOR_PIECES": "1"}, {}], fresh=True)
def test_fuzz_mixed(rank, seed): fuzz(rank, seed)
