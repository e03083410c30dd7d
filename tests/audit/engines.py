"""Engines as sums: what any number of processes hold, and which of it each of their mistakes counts how often.

No process groups: a rank is a list of pieces. The truth is known, because the generator made the tensors.
"""

import math
import random
from dataclasses import dataclass, field

import torch

from gradguard.audit.held import HeldPiece
from gradguard.audit.pieces import summary_of


@dataclass
class Model:
    """What ``world`` ranks hold: of each tensor its kind, and its pieces by rank as (rank, part, copies of it)."""

    world: int
    tensor_parallel: int
    processes: list[list[HeldPiece]]
    pieces: dict[tuple[int, int], tuple[str, int, int]] = field(default_factory=dict)
    true: float = 0.0

    def norms(self, engine, square_of):
        """What each rank says: its engine's sum over the pieces, each with its square."""
        return engine(self, [[square_of(r, h) for h in held] for r, held in enumerate(self.processes)])


def model_of(seed, dp, tp, kinds=("replicated", "sharded", "expert", "stage", "tied"), attributes="none", fresh=False):
    """A random model: of ``dp`` times ``tp`` ranks, the first half of each dp row's columns being stage 0."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    model = Model(dp * tp, tp, [[] for _ in range(dp * tp)])
    for number in range(max(len(kinds), draw.randint(5, 12))):
        _add(model, f"{number}", kinds[number % len(kinds)], draw, generator, dp, tp, attributes, fresh)
    return model


def _add(model, name, kind, draw, generator, dp, tp, attributes, fresh):
    parts = {"replicated": 1, "sharded": tp, "expert": tp, "stage": 1, "tied": 1}[kind]
    numel = draw.randint(2, 40)
    values = [torch.randn(2, numel, generator=generator) * 10 ** draw.uniform(-2, 2) for _ in range(parts)]
    if fresh and kind == "replicated":  # a bias or a norm's weight before the first step
        for pair in values:
            pair[1] = draw.choice([0.0, 1.0])
    model.true = math.hypot(model.true, *(float(gradient.double().norm()) for gradient, _ in values))
    for rank in range(dp * tp):
        part = rank % tp if parts > 1 else 0
        stage = (rank % tp) * 2 // tp
        if kind == "stage" and stage != 0:
            continue
        gradient, weight = values[part]
        names = (f"{kind}.{name}" if kind != "tied" or stage == 0 else f"head.{name}",)
        claim = "sharded" if attributes == "right" and kind in ("sharded", "expert") else None
        claim = draw.choice(["sharded", None]) if attributes == "wrong" else claim
        square, index = float(gradient.double().norm()) ** 2, len(model.processes[rank])
        held = HeldPiece(names, numel, square, summary_of(gradient), summary_of(weight), claim=claim, index=index)
        model.processes[rank].append(held)
        holders = dp if parts > 1 else dp * len({r for r in range(tp) if kind != "stage" or r * 2 // tp == 0})
        model.pieces[rank, index] = (kind, part, holders)


def summed(weight):
    """An engine that adds up over all ranks what ``weight(kind, part, copies, rank, model)`` says of each square."""

    def engine(model, squares):
        total = math.fsum(
            square * weight(*model.pieces[rank, i], rank, model)
            for rank, of_rank in enumerate(squares) for i, square in enumerate(of_rank)
        )  # fmt: skip
        return [math.sqrt(total)] * model.world

    return engine


def once(kind, part, copies, rank, model):
    return 1 / copies


def changed(which, factor):
    """Each element once, but for one kind: so often."""
    return summed(lambda kind, part, copies, rank, model: (factor if kind == which else 1.0) / copies)


def each_copy(which):
    """Facts 1, 5: once for each process that holds it."""
    return summed(lambda kind, part, copies, rank, model: 1.0 if kind == which else 1 / copies)


def first_part_only(which):
    """Fact 2: squares of one class are set to zero where the tensor parallel rank is not 0."""
    return summed(lambda kind, part, copies, rank, model: (part == 0 or kind != which) / copies)


def mean_of_ranks(model, squares):
    """Fact 3: the ranks' norms are averaged."""
    return [sum(math.sqrt(math.fsum(of_rank)) for of_rank in squares) / model.world] * model.world


def local(model, squares):
    """Fact 19: of its own."""
    return [math.sqrt(math.fsum(of_rank)) for of_rank in squares]


def own_experts(model, squares):
    """Fact 4: dense tensors are added up, and each rank adds its own experts."""
    dense = summed(lambda kind, part, copies, rank, model: (kind != "expert") / copies)(model, squares)[0]
    return [
        math.hypot(dense, *(math.sqrt(s) for i, s in enumerate(of_rank) if model.pieces[rank, i][0] == "expert"))
        for rank, of_rank in enumerate(squares)
    ]
