"""A trainer and a rollout engine share one GPU in one process.

    python examples/rl_colocate.py [--steps 2] [--plot timeline.png]

While the rollout generates, the trainer with its optimizer state is in host memory. While
the trainer works, the rollout's memory is free. The rollout wakes in stages: its weights
first, so that they can be updated in place; the cache only when the trainer has gone.
Where there is a GPU, decoding is a captured graph, which replays after every wake because
no pointer ever changes. Without one, set CUMEM_DRIVER=emulated.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import cumem

VOCABULARY, WIDTH, BATCH, LENGTH = 256, 128, 16, 12


class Policy(torch.nn.Module):
    """One layer of attention over a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.project = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of every next token: (batch, time) to (batch, time, vocabulary)."""
        query, key, value = self.project(self.embedding(tokens)).chunk(3, dim=-1)
        attend = torch.nn.functional.scaled_dot_product_attention
        return self.head(attend(query, key, value, is_causal=True))

    def decode(
        self, token: torch.Tensor, position: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Logits of one next token, with a cache of (time, batch, width)."""
        query, key, value = self.project(self.embedding(token)).chunk(3, dim=-1)
        keys.index_copy_(0, position, key[None])
        values.index_copy_(0, position, value[None])
        scores = torch.einsum("bw,tbw->tb", query, keys) / WIDTH**0.5
        future = torch.arange(LENGTH, device=token.device)[:, None] > position
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=0)
        return self.head(torch.einsum("tb,tbw->bw", weights, values))


class Rollout:
    """Generates with a cache; its weights come from the trainer, so a sleep drops them."""

    def __init__(self, device: torch.device) -> None:
        with cumem.use_memory_pool("rollout", on_sleep="discard"):
            self.policy = Policy().to(device).requires_grad_(requires_grad=False)
        with cumem.use_memory_pool("kv_cache"):
            self.keys = torch.zeros(LENGTH, BATCH, WIDTH, device=device)
            self.values = torch.zeros(LENGTH, BATCH, WIDTH, device=device)
        self.token = torch.zeros(BATCH, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.noise = torch.zeros(BATCH, VOCABULARY, device=device)
        self.graph = self._captured() if device.type == "cuda" else None
        self.tags = ["rollout", "kv_cache", *(["graph"] if self.graph is not None else [])]

    def step(self) -> None:
        """Decodes one token: everything it reads and writes has a fixed place."""
        logits = self.policy.decode(self.token, self.position, self.keys, self.values)
        self.token.copy_((logits + self.noise).argmax(dim=-1))
        self.position.add_(1)

    def generate(self, seed: int, *, replay: bool = True) -> torch.Tensor:
        """Samples (batch, time + 1) tokens; the same seed gives the same noise."""
        random = torch.Generator().manual_seed(seed)
        self.token.zero_(), self.position.zero_()
        tokens = [self.token.clone()]
        for _ in range(LENGTH):
            uniform = torch.rand(BATCH, VOCABULARY, generator=random).clamp(1e-6, 1 - 1e-6)
            self.noise.copy_(-(-uniform.log()).log())  # of Gumbel: its argmax is a sample
            if self.graph is not None and replay:
                self.graph.replay()
            else:
                self.step()
            tokens.append(self.token.clone())
        return torch.stack(tokens, dim=1)

    def _captured(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()  # libraries set themselves up outside of a capture
        torch.cuda.current_stream().wait_stream(stream)
        self.position.zero_()
        graph = torch.cuda.CUDAGraph()
        with (
            cumem.graph_pool("graph") as pool,
            torch.cuda.graph(graph, pool=pool.id, stream=stream),
        ):
            self.step()
        return graph


class Trainer:
    """Prefers even tokens; sleeps with its optimizer state while the rollout generates."""

    def __init__(self, device: torch.device) -> None:
        with cumem.use_memory_pool("trainer"):
            self.policy = Policy().to(device)
            self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-3)

    def train(self, tokens: torch.Tensor, passes: int = 4) -> float:
        """Policy gradient on what was generated; returns the mean reward."""
        actions = tokens[:, 1:]
        reward = (actions % 2 == 0).float()
        advantage = reward - reward.mean()
        for _ in range(passes):
            likelihood = self.policy(tokens[:, :-1]).log_softmax(dim=-1)
            taken = likelihood.gather(-1, actions[..., None]).squeeze(-1)
            self.optimizer.zero_grad()
            (-(advantage * taken).mean()).backward()
            with cumem.use_memory_pool("trainer"):  # the optimizer makes its state at first
                self.optimizer.step()
        self.optimizer.zero_grad()  # gradients would stay on the device
        return float(reward.mean())


def update(target: torch.nn.Module, source: torch.nn.Module) -> None:
    """Copies parameters in place: every pointer in the graph stays right."""
    with torch.no_grad():
        for old, new in zip(target.parameters(), source.parameters(), strict=True):
            old.copy_(new)


def addresses(module: torch.nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in module.parameters()]


def one_step(rollout: Rollout, trainer: Trainer, timeline: cumem.Timeline, step: int) -> float:
    """Generate, train, update; the two are on the device together only for the update."""
    tokens = rollout.generate(step)
    timeline.mark(f"step {step}: generated")
    cumem.sleep(tags=rollout.tags)
    cumem.wake_up(tags=["trainer"])
    reward = trainer.train(tokens)
    timeline.mark(f"step {step}: trained")
    cumem.wake_up(tags=["rollout"])  # undefined until the update
    update(rollout.policy, trainer.policy)
    cumem.sleep(tags=["trainer"])
    # The cache, and the graph's memory. What a sleep discarded is undefined, and attention
    # multiplies even what is masked: by zero, which is no help against a NaN.
    cumem.wake_up(tags=rollout.tags, fill="zero")
    return reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--plot", type=Path, help="a picture of memory by phase")
    asked = parser.parse_args()
    torch.manual_seed(0)
    device = cumem.default_device()
    rollout, trainer = Rollout(device), Trainer(device)
    where = addresses(rollout.policy)
    update(rollout.policy, trainer.policy)
    cumem.sleep(tags=["trainer"])
    with cumem.Timeline() as timeline:
        for step in range(asked.steps):
            print(f"step {step}: mean reward {one_step(rollout, trainer, timeline, step):.3f}")
    assert addresses(rollout.policy) == where, "a pointer has changed"
    assert torch.equal(rollout.generate(99), rollout.generate(99, replay=False))
    print(timeline)
    if asked.plot is not None:
        timeline.plot(asked.plot)


if __name__ == "__main__":
    main()
