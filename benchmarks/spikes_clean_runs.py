"""Twenty kinds of training in which nothing is wrong, and how many of their steps the detector skips all the same.

python benchmarks/spikes_clean_runs.py [--runs 5] [--seed 0]

Each kind is trained in several runs at once: every tensor has the run as its first dimension, so that a hundred runs of
500 steps take seconds. A step that is skipped is skipped: the run goes on without it. Each run is judged three times:
without a word about its steps, with the size of each batch (``weight=``) and the name of its task (``kind=``), and by
the rule that skips each step that stands out (``alone=1``).

`HARDER` are kinds whose rare task is more than fifty times as large as the usual one: without its name no rule tells
it from a bad batch.
"""

import argparse
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import gradguard as gg

STEPS = 500


class Net:
    """Layers of as many models as there are runs."""

    def __init__(
        self, runs: int, sizes: list[int], generator: torch.Generator, between: Callable[[Tensor], Tensor]
    ) -> None:
        self.between = between
        self.parameters: list[Tensor] = []
        for inputs, outputs in itertools.pairwise(sizes):
            weight = torch.randn(runs, inputs, outputs, generator=generator) / math.sqrt(inputs)
            self.parameters += [weight.requires_grad_(), torch.zeros(runs, 1, outputs, requires_grad=True)]

    def __call__(self, x: Tensor, parameters: list[Tensor] | None = None) -> Tensor:
        layers = parameters or self.parameters
        for at in range(0, len(layers), 2):
            x = torch.baddbmm(layers[at + 1].expand(-1, x.shape[1], -1), x, layers[at])
            if at + 2 < len(layers):
                x = self.between(x)
        return x


class Task:
    """What is learnt: `loss` gives that of each run, ``[runs]``, and draws its batch."""

    rate, adam = 1e-2, True
    classes, noise = 8, 0.1

    def __init__(self, runs: int, generator: torch.Generator) -> None:
        self.runs, self.generator, self.kind = runs, generator, ""
        self.parameters: list[Tensor] = []
        self.build()

    def net(self, sizes: list[int], between: Callable[[Tensor], Tensor] = torch.tanh) -> Net:
        net = Net(self.runs, sizes, self.generator, between)
        self.parameters += net.parameters
        return net

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(self.runs, *shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(self.runs, *shape, generator=self.generator)

    def schedule(self, i: int) -> float:
        if i < 20:
            return (i + 1) / 20
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (i - 20) / (STEPS - 20)))

    def size(self, i: int) -> int:
        """How many samples batch ``i`` has."""
        del i
        return 32

    def build(self) -> None:
        raise NotImplementedError

    def loss(self, i: int) -> Tensor:
        raise NotImplementedError


class Regression(Task):
    def build(self) -> None:
        self.model = self.net([8, 32, 32, 1])
        self.inner, self.outer = self.normal(8, 16) * 0.4, self.normal(16, 1) * 0.4

    def errors(self, size: int) -> Tensor:
        x = self.normal(size, 8)
        return self.model(x) - torch.tanh(x @ self.inner) @ self.outer

    def loss(self, i: int) -> Tensor:
        return (self.errors(self.size(i)) - self.noise * self.normal(self.size(i), 1)).square().mean((1, 2))


class RegressionBySGD(Regression):
    adam, rate = False, 0.05


class Classification(Task):
    def build(self) -> None:
        self.model = self.net([8, 32, self.classes], torch.relu)
        self.centres = 1.5 * self.normal(self.classes, 8)

    def loss(self, i: int) -> Tensor:
        labels = torch.randint(self.classes, (self.runs, self.size(i)), generator=self.generator)
        x = self.centres.gather(1, labels[..., None].expand(-1, -1, 8)) + self.normal(self.size(i), 8)
        return functional.cross_entropy(self.model(x).transpose(1, 2), labels, reduction="none").mean(1)


class Text(Task):
    """A Markov chain of order 2."""

    rows, words, length = 32, 8, 8

    def build(self) -> None:
        self.chances = (1.6 * self.normal(self.words, self.words, self.words)).softmax(-1)
        self.model = self.net([2 * self.words, 64, self.words], functional.gelu)

    def tokens(self) -> Tensor:
        tokens = [torch.randint(self.words, (self.runs, self.rows), generator=self.generator) for _ in range(2)]
        for _ in range(self.length - 1):
            chances = self.chances[torch.arange(self.runs)[:, None], tokens[-2], tokens[-1]].flatten(0, 1)
            tokens.append(torch.multinomial(chances, 1, generator=self.generator).view(self.runs, self.rows))
        return torch.stack(tokens, -1)

    def of(self, tokens: Tensor) -> Tensor:
        before = [functional.one_hot(part, self.words) for part in (tokens[..., :-2], tokens[..., 1:-1])]
        out = self.model(torch.cat(before, -1).flatten(1, 2).float()).transpose(1, 2)
        return functional.cross_entropy(out, tokens[..., 2:].flatten(1), reduction="none").mean(1)

    def loss(self, i: int) -> Tensor:
        return self.of(self.tokens())


class TextOfManyLengths(Text):
    """Means of 7 to 224 tokens."""

    def loss(self, i: int) -> Tensor:
        self.now = max(1, int(2 ** (5 * float(torch.rand(1, generator=self.generator)))))
        return self.of(self.tokens()[:, : self.now])

    def size(self, i: int) -> int:
        return self.now


class LastOfOne(Regression):
    """An epoch of 63 batches of 16, and one of a single sample."""

    def size(self, i: int) -> int:
        return 1 if i % 64 == 63 else 16


class LastOfOneClassified(Classification):
    def size(self, i: int) -> int:
        return 1 if i % 40 == 39 else 32


class LastOfThree(Classification):
    def size(self, i: int) -> int:
        return 3 if i % 50 == 49 else 64


class LeftOver(Regression):
    """Four micro-batches of 4 are accumulated, and one is left at the end of an epoch."""

    def size(self, i: int) -> int:
        return 4 if i % 31 == 30 else 16


class DeepQ(Task):
    """Q-learning whose target network is replaced every ``sync`` steps."""

    rate, sync, discount = 3e-3, 50, 0.95

    def build(self) -> None:
        self.model = self.net([6, 32, 4], torch.relu)
        self.goal, self.moves = self.normal(1, 6), 0.5 * self.normal(4, 6)

    def schedule(self, i: int) -> float:
        return 1.0

    def loss(self, i: int) -> Tensor:
        if i % self.sync == 0:
            self.target = [p.detach().clone() for p in self.parameters]
        x = self.normal(32, 6)
        actions = torch.randint(4, (self.runs, 32), generator=self.generator)[..., None]
        after = 0.9 * x + self.moves.gather(1, actions.expand(-1, -1, 6)) + 0.3 * self.normal(32, 6)
        reward = (1 - (after - self.goal).square().mean(2)).clamp(-1)
        with torch.no_grad():
            target = reward + self.discount * self.model(after, self.target).amax(2)
        value = self.model(x).gather(2, actions)[..., 0]
        return functional.smooth_l1_loss(value, target, reduction="none").mean(1)


class SlowDeepQ(DeepQ):
    rate, sync, discount = 5e-3, 100, 0.99


class Hinge(Task):
    """Batches of 4, whose loss is often 0."""

    rate, wrong = 5e-3, 0.0

    def build(self) -> None:
        self.model = self.net([8, 16, 1], torch.relu)
        self.plane = self.normal(8, 1)

    def loss(self, i: int) -> Tensor:
        x = self.normal(4, 8)
        labels = (x @ self.plane + 0.3 * self.normal(4, 1)).sign()
        labels = torch.where(self.uniform(4, 1) < self.wrong, -labels, labels)
        return (1 - labels * self.model(x)).relu().mean((1, 2))


class HingeWithWrongLabels(Hinge):
    wrong = 0.1


class Mixed(Task):
    """Tasks of several scales, one a step."""

    scales, shares, noise = (1.0, 3.0, 10.0, 30.0), (0.25, 0.25, 0.25, 0.25), 0.5

    def build(self) -> None:
        self.model = self.net([12, 32, 1])
        self.teachers = self.normal(len(self.scales), 8) * 0.4

    def pick(self, i: int) -> int:
        del i
        return int(torch.multinomial(torch.tensor(self.shares), 1, generator=self.generator))

    def loss(self, i: int) -> Tensor:
        task = self.pick(i)
        self.kind = f"task {task}"
        x, which = self.normal(32, 8), torch.zeros(self.runs, 32, 4)
        which[..., task] = 1
        target = torch.tanh(x @ self.teachers[:, task, :, None]) + self.noise * self.normal(32, 1)
        return self.scales[task] * (self.model(torch.cat([x, which], -1)) - target).square().mean((1, 2))


class MixedAndRare(Mixed):
    scales, shares = (1.0, 5.0), (0.9, 0.1)


class Rare(Mixed):
    """A task that comes every 40th step."""

    scales, every = (1.0, 5.0), 40

    def pick(self, i: int) -> int:
        return int(i % self.every == self.every - 1)


class Adversarial(Task):
    rate = 1e-3

    def build(self) -> None:
        self.makes, self.tells = self.net([4, 32, 2], torch.relu), self.net([2, 32, 1], torch.relu)

    def schedule(self, i: int) -> float:
        return 1.0

    def loss(self, i: int) -> Tensor:
        self.kind = "generator" if i % 2 else "discriminator"
        angle = 6.2832 * self.uniform(64, 1)
        fake = self.makes(self.normal(64, 4))
        if i % 2:
            return functional.softplus(-self.tells(fake, [p.detach() for p in self.tells.parameters])).mean((1, 2))
        real = functional.softplus(-self.tells(torch.cat([angle.cos(), angle.sin()], -1)))
        return (real + functional.softplus(self.tells(fake.detach()))).mean((1, 2))


class HeavyTail(Regression):
    """Noise of Student's t with three degrees of freedom."""

    def loss(self, i: int) -> Tensor:
        noise = self.normal(32, 1) / self.normal(3, 32, 1).square().mean(1).sqrt()
        return (self.errors(32) - self.noise * noise).square().mean((1, 2))


class Policy(Task):
    """A policy gradient: losses of any sign around 0."""

    rate = 3e-3

    def build(self) -> None:
        self.model, self.rewards = self.net([6, 32, 4]), self.normal(6, 4)

    def loss(self, i: int) -> Tensor:
        x = self.normal(32, 6)
        logits = self.model(x)
        actions = torch.multinomial(logits.detach().softmax(-1).flatten(0, 1), 1, generator=self.generator)
        actions = actions.view(self.runs, 32, 1)
        reward = (x @ self.rewards).gather(2, actions)[..., 0]
        reward = reward - reward.mean(1, keepdim=True)
        return -(reward * logits.log_softmax(-1).gather(2, actions)[..., 0]).mean(1)


class Diffusion(Regression):
    """Eight samples, each with a noise level of its own."""

    def loss(self, i: int) -> Tensor:
        level = 10 ** (-2 * self.uniform(8, 1))
        return ((self.errors(8) - level * self.normal(8, 1)) / level).square().clamp(max=1e3).mean((1, 2))


class RareAndLarge(Rare):
    scales, noise = (1.0, 8.0), 0.1


class RareLargeAndOften(Rare):
    scales, every, noise = (1.0, 50.0), 25, 0.1


class MixedRareAndLarge(MixedAndRare):
    scales, noise = (1.0, 30.0), 0.1


KINDS: dict[str, type[Task]] = {
    "regression": Regression,
    "regression, SGD": RegressionBySGD,
    "classification": Classification,
    "text": Text,
    "text of many lengths": TextOfManyLengths,
    "last batch of one sample": LastOfOne,
    "last batch of one sample, classified": LastOfOneClassified,
    "last batch of three samples": LastOfThree,
    "accumulation that leaves one": LeftOver,
    "deep Q, target every 50": DeepQ,
    "deep Q, target every 100": SlowDeepQ,
    "hinge, batches of 4": Hinge,
    "hinge, batches of 4, wrong labels": HingeWithWrongLabels,
    "tasks of mixed scale": Mixed,
    "tasks of mixed scale, one rare": MixedAndRare,
    "a rare task every 40": Rare,
    "GAN": Adversarial,
    "noise with a heavy tail": HeavyTail,
    "policy gradient": Policy,
    "diffusion": Diffusion,
}

HARDER: dict[str, type[Task]] = {
    "a rare and large task every 40": RareAndLarge,
    "a rare and large task every 25": RareLargeAndOften,
    "tasks of mixed scale, one rare and large": MixedRareAndLarge,
}

Decide = Callable[[list[float], list[float], float, str], list[bool]]


def train(name: str, decide: Decide, runs: int, seed: int = 0, steps: int = STEPS) -> list[int]:
    """Train ``runs`` runs of one kind; return how many steps of each were skipped.

    ``decide`` is called with losses and norms of all runs, the weight and the kind of the step; it says which to skip.
    """
    kinds = KINDS | HARDER
    task = kinds[name](runs, torch.Generator().manual_seed(1000 * list(kinds).index(name) + seed))
    first, second = ([torch.zeros_like(p) for p in task.parameters] for _ in range(2))
    taken, skipped = torch.zeros(runs), [0] * runs
    for i in range(steps):
        loss = task.loss(i)
        found = torch.autograd.grad(loss.sum(), task.parameters, materialize_grads=True)
        norm = torch.stack([g.square().flatten(1).sum(1) for g in found]).sum(0).sqrt()
        skips = decide(loss.tolist(), norm.tolist(), float(task.size(i)), task.kind)
        skipped = [count + skip for count, skip in zip(skipped, skips, strict=True)]
        go = 1 - torch.tensor(skips, dtype=torch.float32)
        taken += go
        clipped = (1 / norm.clamp(min=1e-30)).clamp(max=1)
        _step(task, found, first, second, go, clipped, taken, task.rate * task.schedule(i))
    return skipped


@torch.no_grad()
def _step(task: Task, found: Any, first: Any, second: Any, go: Tensor, clipped: Tensor, taken: Tensor, rate: float):
    for p, g, m, v in zip(task.parameters, found, first, second, strict=True):
        shape = (-1, *[1] * (p.dim() - 1))
        go_, g, count = go.view(shape), g * clipped.view(shape), taken.clamp(min=1).view(shape)
        if task.adam:
            m += go_ * 0.1 * (g - m)
            v += go_ * 0.001 * (g * g - v)
            p -= go_ * rate * (m / (1 - 0.9**count)) / ((v / (1 - 0.999**count)).sqrt() + 1e-8)
        else:
            m += go_ * (g - 0.1 * m)
            p -= go_ * rate * m


def skips_of(name: str, runs: int, seed: int = 0, *, told: bool = False, steps: int = STEPS, **options: Any) -> int:
    """How many steps `SkipSpikes` would skip in all runs of one kind."""
    judges = [gg.SkipSpikes(gg.SpikeDetector(**options)) for _ in range(runs)]

    def decide(losses: list[float], norms: list[float], weight: float, kind: str) -> list[bool]:
        skips = []
        for judge, loss, norm in zip(judges, losses, norms, strict=True):
            judge.record_loss(loss, weight if told else 1.0, kind if told and kind else None)
            skips.append(judge.judge_numbers([norm], bad=False))
        return skips

    return sum(train(name, decide, runs, seed, steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ways: dict[str, dict[str, Any]] = {"": {}, "told": {"told": True}, "alone=1": {"alone": 1}}
    print(f"| false skips in {arguments.runs} runs of {STEPS} steps | nothing told | weight and kind | alone=1 |")
    print("|---|---|---|---|", flush=True)
    for title, kinds in (("all 20", KINDS), ("all 3 harder", HARDER)):
        sums = [0, 0, 0]
        for name in kinds:
            found = [skips_of(name, arguments.runs, arguments.seed, **options) for options in ways.values()]
            sums = [a + b for a, b in zip(sums, found, strict=True)]
            print(f"| {name} | {' | '.join(map(str, found))} |", flush=True)
        print(f"| **{title}** | {' | '.join(map(str, sums))} |", flush=True)


if __name__ == "__main__":
    main()
