"""One rank of the PyTorch side of the comparison: a plain Llama under FSDP2, under DDP, or alone.

Started by fsdp2.py with the variables that torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and one argument,
a JSON object. It trains until it is ended and writes a line per step in the form of zf's metrics.jsonl.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


class Attention(nn.Module):
    """Causal self-attention with rotary positions and as many key heads as query heads."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, hidden, bias=False)
        self.v_proj = nn.Linear(hidden, hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x, cos, sin):
        batch, length, hidden = x.shape
        q, k, v = (projection(x).view(batch, length, self.heads, -1).transpose(1, 2)
                   for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, hidden))


def rotate(x, cos, sin):
    """Rotary positions on `[B, H, T, D]`, in the arrangement of Hugging Face."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    """A transformer block: attention and a gated SiLU, each after an RMSNorm."""

    def __init__(self, hidden, intermediate, heads):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.self_attn = Attention(hidden, heads)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    """The model of the benchmark; `forward` returns the mean cross-entropy, computed in float32."""

    def __init__(self, sizes, length, dtype):
        super().__init__()
        hidden, heads = sizes["hidden"], sizes["heads"]
        self.embed_tokens = nn.Embedding(sizes["vocabulary"], hidden)
        self.layers = nn.ModuleList(Block(hidden, sizes["intermediate"], heads) for _ in range(sizes["layers"]))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.lm_head = nn.Linear(hidden, sizes["vocabulary"], bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        width = hidden // heads
        angles = torch.outer(torch.arange(length).float(), 10_000.0 ** (-torch.arange(0, width, 2).float() / width))
        angles = torch.cat((angles, angles), dim=-1)
        # Plain attributes: buffers would be cast and broadcast with the module.
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, tokens, targets):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def adamw(parameters, job):
    """PyTorch's fused AdamW, with decay on matrices only, as zf does it."""
    parameters = list(parameters)
    groups = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": job["weight_decay"]},
              {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=job["lr"], betas=tuple(job["betas"]), eps=1e-8, fused=True)


class Masters:
    """AdamW on float32 copies of 16-bit parameters, for DDP and for one process alone. FSDP2 does this by itself."""

    def __init__(self, parameters, job):
        self.parameters = list(parameters)
        self.masters = [p.detach().float() for p in self.parameters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = adamw(self.masters, job)

    def step(self):
        torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.parameters])
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


def prepare(job, rank, world):
    """The wrapped model and its optimizer."""
    dtype = getattr(torch, job["dtype"])
    # The same start on every rank, as DDP and FSDP2 expect.
    torch.manual_seed(1)
    model = Llama(job["sizes"], job["length"], dtype)
    count = sum(p.numel() for p in model.parameters())
    if count != job["parameters"]:
        sys.exit(f"the PyTorch model has {count} parameters, {job['parameters']} were expected")
    if job["kind"] == "fsdp2":
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        policy = MixedPrecisionPolicy() if dtype == torch.float32 else mixed
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        # The root (embedding, last norm, head) keeps PyTorch's default, which is not to free it between the two passes.
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model, adamw(model.parameters(), job)
    model = model.to(dtype)
    optimizer = adamw(model.parameters(), job) if dtype == torch.float32 else Masters(model.parameters(), job)
    if job["kind"] == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model, optimizer


def batches(job, rank, world):
    """Sequences in the order of the file, `micro_batch` of them a step and rank."""
    with open(job["data"], "rb") as file:
        tokens = torch.frombuffer(bytearray(file.read()), dtype=torch.int16).long()
    length, rows = job["length"], job["micro_batch"]
    sequences = (len(tokens) - 1) // length
    step = 0
    while True:
        first = step * rows * world + rank * rows
        starts = [(first + row) % sequences * length for row in range(rows)]
        part = torch.stack([tokens[start:start + length + 1] for start in starts])
        yield part[:, :-1], part[:, 1:]
        step += 1


def main():
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo")
    model, optimizer = prepare(job, rank, world)
    with open(job["out"], "w", encoding="utf-8") as out:
        start = time.perf_counter()
        for step, (tokens, targets) in enumerate(batches(job, rank, world)):
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            now = time.perf_counter()
            record = {"step": step, "loss": loss.item(), "seconds": {"step": now - start}}
            start = now
            out.write(json.dumps(record) + "\n")
            out.flush()
            if step == job["steps"]:
                break


if __name__ == "__main__":
    main()
