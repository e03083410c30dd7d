"""`gradguard.save_gradients`: a step's gradients as sketches, with how far rounding alone moves each."""

import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.parity.replay import Replay, digest, epsilon_of, precision_of
from gradguard.parity.saved import SavedGradients, SavedParameter, write
from gradguard.parity.shards import LocalParameter, ShardOf, Whole, agree_on, gathered, local_parameters, processes
from gradguard.parity.sketch import HASH_VERSION, ROW_SUMS, SUMS, hashed, row_sketches, sketch_of

Step = Callable[[], Any]
_CONTRASTS = 2
_Sketches = list[list[float]]


def save_gradients(
    file: str | os.PathLike[str] | None,
    model: nn.Module,
    step: Step,
    *,
    perturbed: int = 4,
    parts: Mapping[str, Step] | None = None,
    rows: Sequence[str] = (),
    facts: Mapping[str, float] | None = None,
    dtype: torch.dtype | None = None,
    shard_of: ShardOf | None = None,
) -> SavedGradients:
    r"""Run a step several times and save what a comparison with another set-up needs; `gradguard parity` compares.

    Of each parameter's gradient :math:`g` it keeps 32 sums :math:`s_j = \sum_i \sigma_j(i)\, g_i`, whose signs
    :math:`\sigma_j(i) = \pm 1` are hashed from the place :math:`i` in the whole parameter: shards add up, a factor
    stays a factor, and :math:`\lVert g \rVert^2 \approx \sum_j s_j^2 / 32`. How far rounding moves :math:`g` is
    measured: the step runs once more as it was, and ``perturbed`` times with weights that are changed by some
    :math:`\epsilon` of themselves, the spacing of the coarsest dtype that layers compute in.

    **Guarantees.** Weights, buffers and random generators are as before, to the last bit, also when ``step`` raises;
    gradients are None. Each run begins with the same of all three, so dropout draws the same masks. Nothing is gathered
    but the sketches: temporaries have 65,536 elements, buffers are copied.

    | case | result |
    |---|---|
    | DDP, FSDP1, FSDP2, HSDP, DTensors in any layout | the whole gradient; ranks that hold other copies are found |
    | experts or stages with names of their own, Megatron's layers | an error, unless ``shard_of`` says what they are |
    | dropout | the same masks in all runs; other masks in another set-up, of which `gradguard parity` warns |
    | ``step`` changes weights | an error: it must end after backward |
    | complex or sparse gradients | an error |

    Args:
        file: Where to write, as safetensors; rank 0 does. None to write nothing.
        model: The model. Every process that holds a part of it must call.
        step: Runs forward and backward on one batch, which is the same each time; it may return the loss.
        perturbed: How many runs with changed weights; 8 for a model that routes.
        parts: Other steps of whose gradients a wrong one may be a mixture: each micro-batch alone, the step before.
        rows: Patterns of names, such as ``"embed*"``: of these, wrong rows can be told.
        facts: Positive numbers that a factor may be, such as ``{"tokens": 4096, "micro-batches": 8}``. The world size
            and the sizes of device meshes are known.
        dtype: The coarsest dtype that is computed or communicated in; by default the coarsest that layers return.
        shard_of: Of a name in this process' model, the name and the shape of the whole parameter and where this
            part begins; None of a parameter that is whole.

    Returns:
        What was saved, the same on all processes.

    Raises:
        InvalidValueError: If an argument cannot be meant, or ``step`` leaves no gradient.
        InvalidTypeError: If ``model`` is no module or ``step`` cannot be called.
        UnsupportedGradientError: If the parts of a parameter do not make a whole, copies of one have different weights,
            ``step`` changes weights, or a gradient is complex or sparse.

    Example:
        >>> import torch, gradguard as gg
        >>> model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
        >>> def step(times=1.0):
        ...     loss = model(x).square().mean()
        ...     (times * loss).backward()
        ...     return loss
        >>> right = gg.save_gradients(None, model, step)
        >>> gg.testing.assert_parity(right, gg.save_gradients(None, model, step)).verdict
        'PASS'
        >>> wrong = gg.save_gradients(None, model, lambda: step(times=8.0), facts={"micro-batches": 8})
        >>> gg.testing.assert_parity(right, wrong)
        Traceback (most recent call last):
        gradguard.errors.ParityError: FAIL factor: 2 of 2 parameters × 8... (micro-batches): ...

    Reference:
        Alon, Matias and Szegedy, The Space Complexity of Approximating the Frequency Moments, 1996 (the sketch).
    """
    _check_arguments(model, step, perturbed, parts or {}, facts or {})
    local = local_parameters(model, shard_of)
    run = _Run(model, local, agree_on(local), rows)
    try:
        saved = run.measure(step, perturbed, parts or {}, facts or {}, dtype)
    finally:
        run.replay.restore()
    if file is not None and processes()[0] == 0:
        write(file, saved)
    return saved


def _check_arguments(
    model: object, step: object, perturbed: int, parts: Mapping[str, Step], facts: Mapping[str, float]
) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model is {type(model).__name__}: expected a torch.nn.Module.")
    wrong = [one for one in (step, *parts.values()) if not callable(one)]
    if wrong:
        raise InvalidTypeError(
            f"a step is {type(wrong[0]).__name__}: expected a function without arguments, of forward and backward."
        )
    if perturbed < 1:
        raise InvalidValueError(f"perturbed={perturbed}: expected at least 1 run, or nobody knows what rounding does.")
    for name, value in facts.items():
        if not (math.isfinite(value) and value > 0):
            raise InvalidValueError(f"facts: {name} is {value}: expected a positive number.")


class _Run:
    """One call of `save_gradients`: who holds what, and one all-reduce after each run."""

    def __init__(
        self, model: nn.Module, local: Sequence[LocalParameter], wholes: Mapping[str, Whole], rows: Sequence[str]
    ) -> None:
        if not wholes:
            raise InvalidValueError("the model has no parameter that requires a gradient, so there is nothing to save.")
        self._model, self._local, self._wholes = model, local, wholes
        self._rank, self._world = processes()
        self._device = next((p.weights()[1].device for p in local), torch.device("cpu"))
        self._rows = [n for n, w in wholes.items() if len(w.shape) > 1 and any(fnmatchcase(n, one) for one in rows)]
        if unknown := [one for one in rows if not any(fnmatchcase(name, one) for name in self._rows)]:
            raise InvalidValueError(f"rows={unknown}: no parameter of several dimensions has such a name.")
        self.replay = Replay(model, local)

    def measure(
        self,
        step: Step,
        perturbed: int,
        parts: Mapping[str, Step],
        facts: Mapping[str, float],
        dtype: torch.dtype | None,
    ) -> SavedGradients:
        weights = self._sketches_of_weights()
        before = digest(self._local)
        with precision_of(self._model) as seen:
            losses = [self._loss(self.replay.run(step))]
        random = any(gathered(self.replay.has_drawn()))
        self._check_after(any(gathered(digest(self._local) != before)))
        base, contrasts, rows, about = (
            self._reduced_gradients(),
            self._contrasts(),
            [self._row_sketches()],
            self._about(),
        )
        self._check_has_gradient(about)
        epsilon = max(gathered(self._epsilon({dtype} if dtype else seen)))
        runs = [base]
        for k in range(perturbed + 1):
            if k == 0:
                losses.append(self._loss(self.replay.run(step)))
            else:
                with self.replay.perturbed(epsilon, k):
                    losses.append(self._loss(self.replay.run(step)))
            runs.append(self._reduced_gradients())
            rows.append(self._row_sketches())
        mixed = [self._part(one) for one in parts.values()]
        sketches = {"gradient": runs, "weights": [weights], "contrasts": contrasts}
        return SavedGradients(
            parameters=tuple(about),
            sketches={**sketches, "parts": mixed} if mixed else sketches,
            rows={name: [one[i] for one in rows] for i, name in enumerate(self._rows)},
            parts=tuple(parts),
            facts=self._facts(facts),
            losses=tuple(losses) if all(map(math.isfinite, losses)) else (),
            random=random,
            epsilon=epsilon,
            hash_version=HASH_VERSION,
            versions={"torch": torch.__version__, "python": platform.python_version()},
        )

    # Sketches, the same on all processes.

    def _part(self, step: Step) -> _Sketches:
        self.replay.run(step)
        return self._reduced_gradients()

    def _reduced_gradients(self) -> _Sketches:
        return self._reduced(self._weighted(self._gradient_sketches(), self._share))

    def _gradient_sketches(self) -> dict[str, Tensor]:
        found = {}
        for parameter in self._local:
            if (gradient := parameter.gradient()) is not None:
                found[parameter.name] = sketch_of(gradient[0].pieces(gradient[1]), gradient[1].device)
        return found

    def _contrasts(self) -> list[_Sketches]:
        own = self._gradient_sketches()
        return [self._reduced(self._weighted(own, lambda w, r, j=j: _contrast(w, r, j))) for j in range(_CONTRASTS)]

    def _sketches_of_weights(self) -> _Sketches:
        own = {}
        for parameter in self._local:
            part, weights = parameter.weights()
            own[parameter.name] = sketch_of(part.pieces(weights), weights.device)
        found = self._reduced(self._weighted(own, self._share))
        apart = self._reduced(self._weighted(own, lambda whole, rank: _contrast(whole, rank, 0)))
        for name, sketch, contrast in zip(self._wholes, found, apart, strict=True):
            size = math.hypot(*sketch)
            if math.isfinite(size) and math.hypot(*contrast) > 1e-9 * size:
                raise UnsupportedGradientError(
                    f"{name} has different weights on different ranks, so that it is not one parameter: an expert, a "
                    "tensor-parallel shard or a layer of a stage? Say which part of which whole it is, with "
                    "shard_of=lambda name: (whole name, whole shape, where it begins); or load one checkpoint."
                )
        return found

    def _share(self, whole: Whole, rank: int) -> float:
        return 1 / len(whole.sharers(rank))

    def _weighted(self, own: Mapping[str, Tensor], weight: Callable[[Whole, int], float]) -> Tensor:
        table = torch.zeros(len(self._wholes), SUMS, dtype=torch.float64, device=self._device)
        for i, (name, whole) in enumerate(self._wholes.items()):
            if name in own:
                table[i] = own[name].to(self._device) * weight(whole, self._rank)
        return table

    def _reduced(self, table: Tensor) -> _Sketches:
        if self._world > 1:
            dist.all_reduce(table)
        return table.tolist()

    def _row_sketches(self) -> list[_Sketches]:
        tables = []
        of = {parameter.name: parameter for parameter in self._local}
        for name in self._rows:
            whole = self._wholes[name]
            table = torch.zeros(whole.shape[0], ROW_SUMS, dtype=torch.float64, device=self._device)
            if name in of and (gradient := of[name].gradient()) is not None:
                part, values = gradient
                length = math.prod(whole.shape[1:])
                own = row_sketches(part.pieces(values), whole.shape[0], length, values.device)
                table += own.to(self._device) * self._share(whole, self._rank)
            tables.append(self._reduced(table))
        return tables

    # What else is worth knowing.

    def _loss(self, returned: Any) -> float:
        """The mean over processes; NaN if a step returns no number."""
        own = math.nan
        if isinstance(returned, Tensor) and returned.numel() == 1:
            own = float(returned.detach())
        elif isinstance(returned, int | float):
            own = float(returned)
        return sum(gathered(own)) / self._world

    def _check_after(self, changed: bool) -> None:
        if changed:
            raise UnsupportedGradientError(
                "step() changes the weights, which cannot be undone: let it run forward and backward, and leave "
                "optimizer.step() out. The weights are those after it."
            )

    def _about(self) -> list[SavedParameter]:
        told: dict[str, tuple[str, float, str, float]] = {}
        has: set[str] = set()
        for one in gathered([self._local_about(p) for p in self._local]):
            for name, has_gradient, *about in one:
                told.setdefault(name, tuple(about))
                if has_gradient:
                    has.add(name)
                    told[name] = tuple(about)
        found = []
        for name, whole in self._wholes.items():
            dtype, rounding, layout, of_weights = told[name]
            found.append(
                SavedParameter(name, whole.shape, dtype, rounding, name in has, whole.copies, layout, of_weights)
            )
        return found

    def _local_about(self, parameter: LocalParameter) -> tuple[str, bool, str, float, str, float]:
        gradient, weights = parameter.gradient(), parameter.weights()[1]
        dtype = weights.dtype if gradient is None else gradient[1].dtype
        of_weights = torch.finfo(weights.dtype).eps / 2
        layout = parameter.layout()
        return parameter.name, gradient is not None, str(dtype), torch.finfo(dtype).eps / 2, layout, of_weights

    def _check_has_gradient(self, about: Iterable[SavedParameter]) -> None:
        if not any(p.has_gradient for p in about):
            raise InvalidValueError(
                "step() left no gradient: expected forward and backward of this very model, and no zero_grad() after."
            )

    def _epsilon(self, seen: set[torch.dtype]) -> float:
        dtypes = {p.weights()[1].dtype for p in self._local}
        gradients = {p.parameter.grad.dtype for p in self._local if p.parameter.grad is not None}
        return epsilon_of(dtypes | gradients | seen or {torch.float32}, self._device)

    def _facts(self, facts: Mapping[str, float]) -> dict[str, float]:
        known = {"world size": float(self._world)}
        for parameter in self._local:
            mesh: Any = getattr(parameter.parameter, "device_mesh", None)
            if mesh is not None and mesh.mesh_dim_names:
                known |= {f"size of {name}": float(mesh.size(i)) for i, name in enumerate(mesh.mesh_dim_names)}
        together = {name: value for one in gathered(known) for name, value in one.items()}
        return {**together, **{name: float(value) for name, value in facts.items()}}


def _contrast(whole: Whole, rank: int, which: int) -> float:
    """The weight of a rank's copy in a sum that is 0 if all copies are alike: no pattern of copies cancels in it."""
    sharers = whole.sharers(rank)
    drawn = (hashed(torch.tensor(sharers) + 1000 * which).double() / 2.0**63).tolist()
    mean = sum(drawn) / len(drawn)
    size = math.hypot(*(x - mean for x in drawn))
    return (drawn[sharers.index(rank)] - mean) / size if size else 0.0
