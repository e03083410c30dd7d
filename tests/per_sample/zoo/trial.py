"""One model in one mode: exact, refused in words, a crash, or wrong.

The oracle is plain autograd on each sample alone. Every parameter of every sample is compared: its error may be
`RELATIVE` of the parameter's largest per-sample gradient, or `FACTOR` times what rounding does to the oracle itself,
whichever is larger. In float64 rounding is measured between each sample alone and the same sample's loss in the whole
batch; in float32 and bfloat16, between the oracle in float64 and the oracle in that precision.
The fast clipper makes no per-sample gradients: their norms and the clipped sum are compared.
"""

import random
import time
import traceback
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

import gradguard as gg
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from per_sample.zoo.case import B, ZooCase, cast, samples
from per_sample.zoo.draws import NoReplayError, RecordedDraws, ReplayedDraws
from per_sample.zoo.traces import differences, trace

RELATIVE = {"float64": 1e-9, "float32 inside": 2e-6, "float32": 1e-5, "bfloat16": 2e-2}
FACTOR = 8.0
MOST = {"float64": 1e-11, "float32 inside": 1e-6, "float32": 1e-4, "bfloat16": 0.2}
"""Of the norm of the whole gradient: what rounding may explain at most."""
NOTHING = {"float64": 1e-14, "float32 inside": 1e-9, "float32": 1e-8, "bfloat16": 1e-4}
"""Of the norm of the whole gradient: a parameter whose gradient is zero but for rounding, such as a key's bias."""

Gradients = dict[str, Tensor]
Outputs = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Outcome:
    """What a trial found.

    Attributes:
        kind: "exact", "refused", "crash", "wrong", "left behind" where the model is not as it was found, or "no
            oracle" where the plain model fails already.
        error: The largest error, relative to the parameter's largest per-sample gradient.
        words: Of the refusal or exception; the parameter that is wrong.
        oracle: How single samples were run: "alone", or "in the batch" where its draws cannot be told apart.
        seconds: Of the processor, for all of it.
    """

    kind: str
    error: float = 0.0
    words: str = ""
    oracle: str = "alone"
    seconds: float = 0.0


def trial(case: ZooCase, mode: str) -> Outcome:
    """Try ``case`` in ``mode``."""
    start = time.process_time()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), mock.patch.object(torch, "seed", known_seed):
        warnings.simplefilter("ignore")
        try:
            outcome = _trial(case, mode)
        except Exception as error:  # the harness itself, or the plain model
            outcome = Outcome("no oracle", words=_last_line(error))
    return Outcome(outcome.kind, outcome.error, outcome.words, outcome.oracle, time.process_time() - start)


def known_seed() -> int:
    """As `torch.seed`, which Reformer calls for each layer, but with the same numbers in each run."""
    seed = random.getrandbits(48)
    torch.manual_seed(seed)
    return seed


def _trial(case: ZooCase, mode: str) -> Outcome:
    oracle, largest = _Oracle(case, mode), 0.0
    for clipper_mode in case.clippers:
        found = _attempt(case, mode, clipper_mode, oracle)
        if found.kind != "exact":
            return found
        largest = max(largest, found.error)
    return Outcome("exact", largest, oracle=oracle.kind)


def _attempt(case: ZooCase, mode: str, clipper_mode: str, oracle: "_Oracle") -> Outcome:
    """One clipper on one model."""
    model = build(case, mode)
    before = trace(model)
    clipper: gg.PerSampleGradientClipper | None = None
    try:
        try:
            clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(oracle.max_norm), mode=clipper_mode)
            error, words = oracle.compare(model, clipper)
        finally:
            if clipper is not None:
                clipper.detach()
    except (UnsupportedGradientError, InvalidValueError) as refusal:
        # What the forward itself changes may have happened or not.
        left = differences(trace(model), before, *([] if clipper is None else oracle.traces))
        if left:
            return Outcome("left behind", words=f"refused, {left}", oracle=oracle.kind)
        return Outcome("refused", words=" ".join(str(refusal).split()), oracle=oracle.kind)
    except Exception as crash:
        return Outcome("crash", words=_last_line(crash), oracle=oracle.kind)
    if words:
        return Outcome("wrong", error, f"{words} (mode={clipper_mode!r})", oracle.kind)
    left = differences(trace(model), oracle.traces[0 if clipper_mode == "exact" else -1])
    if left:
        return Outcome("left behind", words=left, oracle=oracle.kind)
    return Outcome("exact", error, oracle=oracle.kind)


def _last_line(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split())
    return f"{type(error).__name__} at {frame.filename.rpartition('/')[2]}:{frame.lineno}: {words}"


def precision(mode: str) -> str:
    """The dtype that is computed in: "float32", "bfloat16", or "float64" where the mode names none."""
    return next((name for name in ("float32", "bfloat16") if mode.startswith(name)), "float64")


def build(case: ZooCase, mode: str) -> nn.Module:
    """The model, the same each time, perturbed so that nothing is zero by accident."""
    torch.manual_seed(0)
    random.seed(0)
    model = case.build()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters() if case.perturbed else []:
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(
                parameter.dtype
            )
    double = precision(mode) == "float64"
    kinds = {False: torch.float64, True: torch.complex128} if double else {False: torch.float32, True: torch.complex64}
    if any(p.is_complex() for p in model.parameters()):  # `to` would make them real
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.data = tensor.data.to(kinds[tensor.is_complex()])
    else:
        model.to(kinds[False])
    return model.train("train" in mode)


def outputs_of(value: Any) -> Outputs:
    """The floating-point tensors in what a model returned, but for caches."""
    try:
        leaves = [(str(path), leaf) for path, leaf in tree_flatten_with_path(value)[0]]
    except ValueError:  # a class of outputs that gives no names
        leaves = [(str(i), leaf) for i, leaf in enumerate(tree_leaves(value))]
    return [
        (path, leaf)
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad and "cache" not in path
        and "past_key_values" not in path
    ]  # fmt: skip


class _Oracle:
    """Each sample alone, by plain autograd."""

    def __init__(self, case: ZooCase, mode: str) -> None:
        self._case, self._mode = case, mode
        self._dtype = torch.float64 if precision(mode) == "float64" else torch.float32
        torch.manual_seed(2)
        self._inputs = cast(case.inputs(), self._dtype)
        self.kind = "alone"
        self._parts = [B] if "train" in mode or case.loss is not None else [B, B - 1]  # of the fast clipper
        self._run_batch()
        self.gradients, self._rows_differ = self._alone(mode)
        self._noise = self._rounding()
        whole = torch.stack([norms(g) for g in self.gradients.values()]).norm(dim=0)
        self.norms = whole
        if not bool(whole.isfinite().all()) or not float(whole.max()) > 0:
            raise ValueError(f"the oracle's norms are {whole.tolist()}")
        self.max_norm = float(whole.median())

    # Plain runs

    def _seeded(self) -> None:
        torch.manual_seed(3)
        random.seed(3)
        numpy.random.seed(3)

    def _autocast(self, mode: str) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if mode == "bfloat16" else nullcontext()

    def _run_batch(self) -> None:
        model = build(self._case, self._mode)
        self._seeded()
        with RecordedDraws() as self._recorded, self._autocast(self._mode):
            if self._case.loss is None:
                self._outputs = outputs_of(self._case.call(model, self._inputs))
            else:
                self._outputs = [("loss", self._case.loss(model, self._inputs))]
        if self._recorded.draws:  # they would be others in a second mini-batch
            self._parts = [B]
        self._rng = torch.get_rng_state()
        self.traces = [trace(model)]
        if not self._outputs:
            raise ValueError("no output has a gradient")
        if len(self._parts) > 1:
            with self._autocast(self._mode):
                self._case.call(model, samples(self._inputs, 0, self._parts[1]))
            self.traces.append(trace(model))
        generator = torch.Generator().manual_seed(4)
        self._weights = {p: torch.randn(t.shape, generator=generator, dtype=torch.float64) for p, t in self._outputs}

    def _alone(self, mode: str) -> tuple[Gradients, bool]:
        rows, differ = [], False
        try:
            for i in range(B):
                gradients, equal = self._one(i, mode)
                rows.append(gradients)
                differ |= not equal
        except NoReplayError:
            return self._in_batch(), False
        if differ and self._recorded.draws:
            return self._in_batch(), False
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}, differ

    def _one(self, i: int, mode: str) -> tuple[Gradients, bool]:
        model = build(self._case, mode)
        self._seeded()
        inputs = cast(samples(self._inputs, i, i + 1), torch.float64 if precision(mode) == "float64" else torch.float32)
        equal = True
        with ReplayedDraws(self._recorded.draws, i, B):
            with self._autocast(mode):
                if self._case.loss is not None:
                    loss = self._case.loss(model, inputs)
                else:
                    found = outputs_of(self._case.call(model, inputs))
                    loss, equal = self._projected(found, i)
            loss.backward()
        return _filled(model), equal

    def _projected(self, found: Outputs, i: int) -> tuple[Tensor, bool]:
        """A sample's loss, and whether its outputs are those that it has in the batch."""
        if [p for p, _ in found] != [p for p, _ in self._outputs]:
            raise ValueError("a sample alone has other outputs than the batch")
        total, equal, self._axes = torch.zeros((), dtype=torch.float64), True, {}
        for (path, one), (_, batch) in zip(found, self._outputs, strict=True):
            dims = [d for d in range(one.dim()) if one.dim() == batch.dim() and one.shape[d] != batch.shape[d]]
            if len(dims) != 1 or batch.shape[dims[0]] != B * one.shape[dims[0]]:
                continue
            dim, length = dims[0], one.shape[dims[0]]
            self._axes[path] = dim, length
            row = batch.detach().narrow(dim, i * length, length)
            limit = {"float64": 1e-9, "float32": 1e-3}.get(str(row.dtype)[6:], 1e-1)
            limit = 1e-4 if self._recorded.narrowed else limit
            difference = float((row.double() - one.detach().double()).abs().max()) if one.numel() else 0.0
            equal &= difference <= limit * (float(row.double().abs().max()) + 1e-12) if one.numel() else True
            total = total + (one.double() * self._weights[path].narrow(dim, i * length, length)).sum()
        if not self._axes:
            raise ValueError(f"no output has a batch axis: {[tuple(t.shape) for _, t in found]}")
        return total, equal

    def _losses(self, outputs: Outputs) -> Tensor:
        """Each sample's loss in the batch, ``[B]``."""
        total = torch.zeros((), dtype=torch.float64)
        for path, batch in outputs:
            if path in self._axes:
                dim, length = self._axes[path]
                size = batch.shape[dim] // length
                weighted = batch.double() * self._weights[path].narrow(dim, 0, size * length)
                total = total + weighted.movedim(dim, 0).reshape(size, -1).sum(1)
        return total

    def _in_batch(self) -> Gradients:
        """One sample's loss after the other, backward through the batch, by plain autograd."""
        if self._case.loss is not None:
            raise ValueError("the draws of the batch cannot be told apart by samples")
        if not hasattr(self, "_axes") or not self._axes:
            with torch.no_grad():
                self._axes = {
                    p: (d, t.shape[d] // B) for p, t in self._outputs for d in range(t.dim()) if t.shape[d] == B
                }
        self.kind = "in the batch"
        return self._each_in_batch()

    def _each_in_batch(self) -> Gradients:
        model = build(self._case, self._mode)
        self._seeded()
        with self._autocast(self._mode):
            outputs = outputs_of(self._case.call(model, self._inputs))
        rows, losses = [], self._losses(outputs)
        for i in range(B):
            model.zero_grad()
            losses[i].backward(retain_graph=True)
            rows.append(_filled(model))
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _rounding(self) -> Gradients:
        """What rounding does to the oracle's gradient of each parameter: the norm of the difference, ``[B]``."""
        try:
            if precision(self._mode) != "float64":
                return self._far_from(self._alone("train" if "train" in self._mode else "eval")[0])
        except RuntimeError:  # a kernel that knows no float64
            pass
        if self._case.loss is not None or self.kind != "alone" or self._rows_differ:
            return {name: torch.zeros(B, dtype=torch.float64) for name in self.gradients}
        return self._far_from(self._each_in_batch())

    def _far_from(self, other: Gradients) -> Gradients:
        return {name: norms(g.double() - other[name].double()) for name, g in self.gradients.items()}

    # The clipper

    def compare(self, model: nn.Module, clipper: Any) -> tuple[float, str]:
        """Run the clipper; return the largest relative error, and the name of the parameter if it is too large."""
        exact = clipper._mode == "exact"
        parts = [B] if exact else self._parts
        for part in parts:
            inputs = samples(self._inputs, 0, part)
            self._seeded()
            with self._autocast(self._mode):
                if self._case.loss is None:
                    outputs = outputs_of(self._case.call(model, inputs))
                else:
                    loss = self._case.loss(model, inputs)
                    outputs = [("loss", loss)]
            if part == B:
                words = self._outputs_differ(outputs)
                if words:
                    return 1.0, words
                if not torch.equal(torch.get_rng_state(), self._rng):
                    return 1.0, "the random generator is elsewhere than after a plain forward"
            if self._case.loss is None:
                loss = self._losses(outputs).mean()
            loss.backward()
            if exact:
                return self._errors({name: real_parts(g).clone() for name, g in clipper.per_sample_gradients().items()})
            clipper.clip_and_accumulate()
            error, words = self._norm_errors(clipper.statistics.parameter_norms)
            if words:
                return error, words
        clipper.pre_step()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found = {name: real_parts(grad).unsqueeze(0).clone() for name, grad in grads.items()}
        factors = (self.max_norm / self.norms.clamp(min=1e-300)).clamp(max=1)
        weights = torch.stack([factors * (torch.arange(B) < part) for part in parts]).sum(0) / sum(parts)
        expected = {n: torch.einsum("b,b...->...", weights, g.double()).unsqueeze(0) for n, g in self.gradients.items()}
        bars = {name: (bar * weights).sum().unsqueeze(0) for name, bar in self._bars().items()}
        # The error of a sample's norm moves its factor.
        slack = sum(float(bar.max()) for bar in self._bars().values()) / float(self.norms.max()) + 1e-12
        for name, bar in bars.items():
            bars[name] = bar + slack * (weights * norms(self.gradients[name])).sum()
        for p in model.parameters():
            p.grad = None
        return self._errors(found, expected, bars)

    def _outputs_differ(self, outputs: Outputs) -> str:
        if [p for p, _ in outputs] != [p for p, _ in self._outputs]:
            return "outputs: others than without a clipper"
        for (path, found), (_, plain) in zip(outputs, self._outputs, strict=True):
            limit = {"float64": 1e-10, "float32": 1e-4}.get(str(found.dtype)[6:], 5e-2)
            limit = 1e-5 if self._recorded.narrowed else limit
            limit = 5e-2 if self._mode == "bfloat16" else limit
            if found.shape != plain.shape or found.dtype != plain.dtype:
                return f"outputs: {path} {tuple(found.shape)}, plain {tuple(plain.shape)}"
            if found.numel():
                scale = float(plain.detach().double().abs().max())
                off = float((found.detach().double() - plain.detach().double()).abs().max())
                if not off <= limit * scale:
                    return f"outputs: {path} is off by {off:.2g} of {scale:.2g}"
        return ""

    def _bars(self) -> dict[str, Tensor]:
        kind = precision(self._mode)
        if kind == "float64" and self._recorded.narrowed:
            kind = "float32 inside"
        bars = {}
        for name, g in self.gradients.items():
            norm = norms(g).max()
            noise = (FACTOR * self._noise[name].max()).clamp(max=MOST[kind] * self.norms.max())
            bars[name] = (RELATIVE[kind] * norm + noise + NOTHING[kind] * self.norms.max()).expand(B)
        return bars

    def _norm_errors(self, found: Mapping[str, Tensor]) -> tuple[float, str]:
        """As `_errors`, of each sample's norm of each parameter."""
        bars = self._bars()
        for name, g in self.gradients.items():
            plain = norms(g)[: len(found[name])]
            off = (found[name] - plain).abs()
            if not bool((off <= bars[name][: len(plain)]).all()):
                i = int(off.argmax())
                return float(off[i] / plain.max()), (
                    f"{name}, sample {i}: norm {float(found[name][i]):.3g} instead of {float(plain[i]):.3g}"
                )
        return 0.0, ""

    def _errors(
        self, found: Gradients, expected: Gradients | None = None, bars: dict[str, Tensor] | None = None
    ) -> tuple[float, str]:
        expected, bars = expected or self.gradients, bars or self._bars()
        worst, words = 0.0, ""
        if found.keys() != expected.keys():
            return 1.0, f"other parameters: {sorted(found.keys() ^ expected.keys())[:3]}"
        for name, g in expected.items():
            off = norms(found[name].double() - g.double())
            norm = float(norms(g).max())
            relative = float(off.max()) / norm if norm > 1e-9 * float(self.norms.max()) else 0.0
            worst = max(worst, relative if relative == relative else 1e300)
            beyond = ~(off <= bars[name])
            if bool(beyond.any()) and not words:
                i = int(beyond.nonzero()[0])
                allowed = float(bars[name][i])
                words = f"{name}, sample {i}: off by {float(off[i]):.2g}; its norm {norm:.2g}, allowed {allowed:.2g}"
        return worst, words


def norms(rows: Tensor) -> Tensor:
    return rows.double().reshape(len(rows), -1).norm(dim=1)


def real_parts(gradient: Tensor) -> Tensor:
    """The real and imaginary parts of a complex gradient: one parameter, with the norm of both."""
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _filled(model: nn.Module) -> Gradients:
    return {
        name: real_parts(torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone()).detach()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
