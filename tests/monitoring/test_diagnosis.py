"""What is the matter with a run: each cause on a record made up for it, and what no record may be told."""

import math
import random
import re
from dataclasses import replace
from functools import cache

import pytest
from synthetic import changed, log_normal, make_record, steps_of, write_char_rnn, write_gan, write_sick

from gradguard.monitoring.judge.cause import CERTAINTIES
from gradguard.monitoring.judge.causes import CAUSES, KEYS
from gradguard.monitoring.judge.diagnosis import SYMPTOMS, diagnose, weighed_findings
from gradguard.monitoring.judge.health import findings
from gradguard.monitoring.judge.recommend import recommend
from gradguard.monitoring.judge.signals import period_of
from gradguard.monitoring.judge.spikes import spikes_of
from gradguard.monitoring.record.step_rows import by_optimizer

COUNT = 400
NAMES = [f"layers.{k}.weight" for k in range(10)]


def falling(count=COUNT, start=2.0, end=0.2, noise=0.03, seed=0):
    """Losses of a run that learns."""
    generator = random.Random(seed)
    size = count / 5
    return [end + (start - end) * math.exp(-i / size) + start * generator.gauss(0, noise) * 0.3 for i in range(count)]


def flat(count=COUNT, level=2.0, noise=0.02, seed=1):
    """Losses of a run that does not."""
    generator = random.Random(seed)
    return [level * (1 + generator.gauss(0, noise)) for _ in range(count)]


def noisy(losses, noise=0.06, seed=2):
    generator = random.Random(seed)
    return [loss + generator.gauss(0, noise) for loss in losses]


def calm(count=COUNT, seed=0):
    return log_normal(count, spread=0.2, seed=seed)


def run(losses=None, norms=None, lr=0.1, optimizer="SGD", eps=None, meta=None, tensors=(), events=(), end=None, **more):
    """A record of one optimizer; ``lr`` is a number or one for each step."""
    norms = calm(len(losses or range(COUNT))) if norms is None else norms
    rates = lr if isinstance(lr, list) else [lr] * len(norms)
    steps = [
        {"t": "step", "i": i, "norm": norm, "lr": rate} | more
        for i, (norm, rate) in enumerate(zip(norms, rates, strict=True))
    ]
    for step, loss in zip(steps, losses or (), strict=False):
        step["loss"] = loss
    about = {"t": "meta", "optimizers": [optimizer], "eps": [eps], "argv": ["train.py"]} | (meta or {})
    return make_record(meta=about, steps=steps, tensors=list(tensors), events=list(events), end=end)


def params(names=NAMES, shape=(16, 16), **more):
    return [
        {"name": name, "shape": list(shape), "numel": math.prod(shape), "dtype": "float32", "group": 0, "order": k}
        | more
        for k, name in enumerate(names)
    ]


def lines(norms, ratio=1e-3, weight=4.0, count=COUNT, every=10, grow=1.0, **more):
    """Lines of per-tensor numbers that are the same all along, with weights that grow by so much in all."""
    return [
        {"t": "tensors", "i": i, "norm": list(norms), "weight": [weight * grow ** (i / count)] * len(norms),
         "update": [ratio * weight * grow ** (i / count)] * len(norms)} | more
        for i in range(0, count, every)
    ]  # fmt: skip


def moving(weight_of, ratio=1e-3, names=10, every=10):
    """Lines of weights of the norms ``weight_of(i)``, one number or one for each."""
    found = []
    for i in range(0, COUNT, every):
        weight = weight_of(i)
        weights = weight if isinstance(weight, list) else [weight] * names
        updates = [ratio * one for one in weights]
        found.append({"t": "tensors", "i": i, "norm": [0.1] * names, "weight": weights, "update": updates})
    return found


def in_turns(losses, times=1e-3):
    """Losses of three kinds in turn, one of them far larger."""
    return [loss * (1 if i % 3 == 1 else times) for i, loss in enumerate(losses)]


def told(kind, **more):
    """What only the watched process can say."""
    return {"t": "event", "i": 9, "kind": kind, "severity": "error", "message": "m", "advice": "a"} | more


def with_bad_batches(every=40, times=60.0):
    losses, norms = falling(), calm()
    for i in range(every - 1, COUNT, every):
        losses[i] *= times
        norms[i] *= times
    return losses, norms


def clipped(threshold, losses=None, optimizer="SGD", norms=None, **more):
    record = run(losses, norms, optimizer=optimizer, threshold=threshold, rule="norm", **more)
    return changed(record, lambda step: step.update(coefficient=min(1.0, threshold / step["norm"])))


TENTH = [0.1] * 10
HARD = set(random.Random(0).sample(range(198), 80))
GROWING = [x * {197: 2.6, 198: 6.0, 199: 10.0}.get(i, 1.0) for i, x in enumerate(calm())]
THROWN = falling(200, noise=0.0) + falling(200, start=1.9, end=0.5, noise=0.0)
NAN_AT = 250
LOST = {"loss": None, "norm": None, "nonfinite": 4}
HEAVY = [10.0]
HEAVY += [
    (60 if i < 60 else 12 if i > 358 else 7 + 20 * math.exp(-i / 80)) * x
    for i, x in enumerate(log_normal(399, spread=1.0, seed=4))
]
DEPTH = [10.0 ** (k - 9) for k in range(10)]
FLAT_META = {"params": params()}
TWO_LAYERS = {
    "params": [
        one for name in ("body", "head") for one in (*params([f"{name}.weight"]), *params([f"{name}.bias"], (16,)))
    ]
}
THREE_LAYERS = {
    "params": [
        one
        for name, shape in (("body", (64, 16)), ("middle", (64, 64)), ("head", (1, 64)))
        for one in (*params([f"{name}.weight"], shape), *params([f"{name}.bias"], shape[:1]))
    ]
}
RISES_FAR = [*falling(60, 1.3, 0.5), *[0.5 * 1.012**i for i in range(340)]]
LARGE_WEIGHTS = [
    line | {"weight": [32.0, 1.0, 64.0, 1.0, 9.0, 1.0], "norm": [6e3, 2600.0, 1.1e4, 660.0, 1.3e4, 130.0]}
    for line in lines([0.0] * 6)
]


def lost(record, at=NAN_AT, **first):
    record = changed(record, lambda step: step.update(LOST), slice(at, None))
    return changed(record, lambda step: step.update(first), slice(at, at + 1))


def scaled():
    """Norms that double with the loss scale."""
    record = clipped(1.0, flat(), norms=[7e4 * (1 + (i > 200)) * x for i, x in enumerate(calm())])
    steps = list(record.steps)
    for i, step in enumerate(steps):
        step["amp_scale"] = 65536.0 * (1 + (i > 200))
    return replace(record, steps=steps)


CASES = {
    # name: record, key, words of the headline, the advice or the evidence
    "healthy": (run(falling()), "healthy", "^Your run is well"),
    "healthy, Adam with a rate that ends at 0": (
        run(falling(), lr=[0.001 * (1 + math.cos(math.pi * i / COUNT)) for i in range(COUNT)], optimizer="Adam"),
        "healthy", "well"),
    "healthy, norms that rise tenfold in a warm-up": (
        run(falling(), norms=[x * (0.1 + 0.9 * min(1, i / 200)) for i, x in enumerate(calm())]), "healthy", "well"),
    "healthy, a guard": (clipped(2.0, falling()), "healthy", "well"),
    "healthy, heavy tails": (run(falling(), log_normal(COUNT, spread=0.8)), "healthy", "well"),
    "one spike": (run(falling(), [x * (50 if i == 200 else 1) for i, x in enumerate(calm())]), "healthy", "well"),
    "too short": (run(falling(30)), "unknown", "30 steps, too few"),
    "nothing": (make_record(), "unknown", "no norms"),
    "rate 0": (run(flat(), lr=0.0), "rate_zero", "learning rate is 0.*Set lr above 0"),
    "rate too low": (
        run([2.0 - i / 4000 for i in range(COUNT)], lr=1e-6, meta=FLAT_META, tensors=lines(TENTH, ratio=1e-6)),
        "rate_too_low", r"1e-06, is too low: the loss went from .*Multiply .* by 1000, to 0.001.*0.04 % at most"),
    "rate halved every 10 steps": (
        run([1.4 + 0.6 * math.exp(-i / 15) for i in range(COUNT)], lr=[0.1 / 2 ** (i // 10) for i in range(COUNT)]),
        "rate_decayed", "nearly 0 from step 60 on, while the loss was still falling"),
    "rate that leapt": (
        run(falling(200) + flat(200, 3.0, 0.1), lr=[0.01] * 200 + [1.0] * 200), "rate_leapt",
        "leapt up, at step 200.*from 0.01 to 1"),
    "rate too high, thrown up": (
        run([2.0, 9.0, 30.0, 12.0, *flat(396, 2.4, 0.05)]), "rate_too_high",
        r"went from 2.00 to 2.\d\d.*by 0.3, from 0.1 to 0.03.*raised the loss from 2.* to 30"),
    "rate too high, Adam without a sign in the norms": (
        run(flat(), lr=0.1, optimizer="Adam", eps=1e-8, meta=FLAT_META, tensors=lines(TENTH, 0.2, grow=8.0)),
        "rate_too_high", "by 0.1, from 0.1 to 0.01.*Weights grew"),
    "bad batches, every 40": (
        run(*with_bad_batches()), "bad_batches",
        r"every 40 steps .*: those of steps 39, 79, 119, 159 ….*Until then, clip at 0\.99"),
    "bad batches among steps that are mostly noise": (
        run([2.0 + x for x in with_bad_batches()[0]], with_bad_batches()[1], meta=FLAT_META,
            tensors=[line | {"norm": [calm()[line["i"]] / 10**0.5] * 10} for line in lines(TENTH, ratio=0.2)]),
        "bad_batches", r"clip at 0\.0\d+\."),
    "a batch that broke the run": (
        run([*falling(100), 300.0, 9000.0, 40.0, 700.0, *flat(296, 50.0)], [*calm(100), 900.0, *calm(299)]),
        "bad_batches", "One batch .* that of step 100"),
    "a batch out of calm, and numbers that were lost soon after": (
        lost(run([*falling(100), 600.0, 9e6, 4e9, 7e15, *flat(296)], [*calm(100), 900.0, 4e8, 9e12, 4e20, *calm(296)]),
             104),
        "bad_batches", "One batch .* that of step 100"),
    "a rate that took four steps to lose the numbers": (
        lost(run([*falling(100), 1.0, 30.0, 4e6, 7e15, *flat(296)], [*calm(100), 4.0, 100.0, 9e9, 4e20, *calm(296)]),
             104),
        "nonfinite_growth", "grew until"),
    "NaN out of nothing": (
        lost(run(falling())), "nonfinite_data", "At step 250 .* nothing had grown before.*gradguard explain nan"),
    "NaN in the data": (
        lost(run(falling()), origin=["data", "float32"]), "nonfinite_data", "The data themselves held"),
    "NaN before the first update": (lost(run(falling()), 0), "nonfinite_data", "step 0"),
    "overflow of float16 in a run that learns": (
        lost(run(falling(), meta={"compute": ["float16", "float32"]}), origin=["Mul", "float16"]), "nonfinite_range",
        "overflowed float16 .above 65,504. at step 250 while the run was learning.*bfloat16.*Mul, in float16"),
    "overflow of float16, without its place": (
        lost(run(falling(), amp_scale=1024.0)), "nonfinite_range", "float16"),
    "overflow of exp": (lost(run(falling()), origin=["Exp", "float32"]), "nonfinite_range", "logsumexp"),
    "grown until infinite": (
        lost(run([2.0 * 1.5 ** max(0, i - 230) for i in range(COUNT)], [1.5 ** max(0, i - 230) for i in range(COUNT)])),
        "nonfinite_growth", "grew until.*step 250.*by 0.3.*Clip at 1.0 as well"),
    "grown out of zeros, without losses": (
        lost(run(norms=[0.0] * (NAN_AT - 5) + [10.0**k for k in range(5)] + [1.0] * (COUNT - NAN_AT))),
        "nonfinite_growth", "grew until"),
    "grown, but far below the first norms": (
        lost(run(falling(), [90.0 * math.exp(-i / 50) * (1.6 ** max(0, i - 235)) for i in range(COUNT)])),
        "nonfinite_growth", "grew"),
    "clip below eps": (
        clipped(1e-7, flat(), "Adam", eps=1e-8, meta=FLAT_META, tensors=lines(TENTH)), "clip_starves",
        "The clip at 1e-07 starves.*below its eps, 1e-08.*Raise the threshold to 1"),
    "one module a billion times the others, Adam": (
        clipped(1.0, flat(), "Adam", norms=[1e9 * x for x in calm()], eps=1e-8, meta=FLAT_META,
                tensors=lines([0.1] * 9 + [1e9])),
        "clip_starves", "The clip at 1.0 starves"),
    "clip that is the rate": (
        clipped(0.01, [2.0 - i / 2000 for i in range(COUNT)]), "clip_starves", "multiplies the learning rate by 0.01"),
    "clip that is a seventh of the rate": (
        clipped(0.15, [2.0 - i / 2000 for i in range(COUNT)]), "clip_starves", "multiplies the learning rate by 0.15"),
    "clip that is a third of the rate": (clipped(0.35, [2.0 - i / 2000 for i in range(COUNT)]), "healthy", "well"),
    "clip that is the rate, while the loss stands still within its noise": (
        clipped(0.01, [2.4] * 5 + flat(395, 2.1, 0.3)), "clip_starves", "multiplies the learning rate by 0.01"),
    "a run that diverged under a clip which it went far beyond": (
        clipped(0.01, [2.0 * 1.05**i for i in range(COUNT)]), "rate_too_high", "by 0.3"),
    "a clip by hand that is the rate": (
        run([2.0 - i / 2000 for i in range(COUNT)], [0.01] * COUNT, meta=FLAT_META, tensors=lines(TENTH, 1e-5)),
        "clip_starves", "scales gradients to a norm of 0.01.*multiplies or divides p.grad"),
    "a clip by hand below eps": (
        run(flat(), [1e-7] * COUNT, optimizer="Adam", eps=1e-8, meta=FLAT_META, tensors=lines([1e-7] * 10)),
        "clip_starves", "scales gradients to a norm of 1e-07"),
    "a clip by hand under which weights move": (
        run(falling(), [1.0] * COUNT, meta=FLAT_META, tensors=lines(TENTH, 3e-3)), "healthy", "well"),
    "clips of different parameters that starve SGD": (
        changed(clipped(0.01, [2.0 - i / 2000 for i in range(COUNT)]), lambda step: step.update(
            clips_disjoint=True, clips=[["norm", 0.01, 0.02], ["norm", 0.01, 0.004], ["norm", 0.03, 0.01]])),
        "clip_starves",
        "^Each of 3 clips of different parameters at 0.01 to 0.03 starve.*rate by 0.01.*clip all parameters"),
    "clips of different parameters, one of which is harmless, below eps": (
        changed(clipped(1.0, flat(), "Adam", eps=1e-8, meta=FLAT_META, tensors=lines(TENTH)), lambda step: step.update(
            clips_disjoint=True, clips=[["norm", 1e-8, 1e-8], ["norm", 1e-8, 2e-8], ["norm", 1.0, 0.9]])),
        "clip_starves", "^Each of 2 clips of different parameters at 1e-08 starve.*below its eps.*at most; eps"),
    "one of two clips of different parameters, below eps": (
        changed(clipped(1.0, flat(), "Adam", eps=1e-8, meta=FLAT_META, tensors=lines(TENTH)), lambda step: step.update(
            clips_disjoint=True, clips=[["norm", 1e-8, 1e-8], ["norm", 1.0, 0.9]])),
        "clip_starves", "^The clip of some parameters at 1e-08 starves.*Remove that clip.*at most; eps"),
    "clips of different parameters that learn": (
        changed(clipped(0.01, falling()), lambda step: step.update(
            clips_disjoint=True, clips=[["norm", 0.01, 0.02], ["norm", 0.01, 0.004], ["norm", 0.03, 0.01]])),
        "healthy", "well"),
    "clip on scaled gradients": (scaled(), "clip_before_unscale", r"scaler.unscale_\(optimizer\) before the clip"),
    "clip twice": (
        changed(clipped(1.0, flat()), lambda step: step.update(
            coefficient=0.01, clips=[["norm", 1.0, 0.9], ["value", 0.001, 0.01]])),
        "clip_twice", "clipped 2 times in each step"),
    "clip twice on half of the steps, one clip on the others": (
        changed(clipped(1.0, flat()), lambda step: step.update(
            coefficient=0.01, clips=[["norm", 1.0, 1.0], ["value", 0.001, 0.01]]), slice(0, COUNT, 2)),
        "clip_twice", "at 1.0. bound on 0 %, the second .value at 0.001. bound on 100 %; together .* by 0.01"),
    "gradients kept": (
        run(falling(), kept_gradients=True), "accumulation", r"Call optimizer.zero_grad\(\) once for each step"),
    "micro-batches summed": (
        run([2.0, 5.0, 20.0, *flat(397, 3.0)], backwards=8), "accumulation", r"\(loss / 8\).backward"),
    "another model's optimizer": (
        make_record(
            meta={"t": "meta", "optimizers": ["SGD"], "leaves": 6, "params": [{"name": "a", "shape": [2], "numel": 2}]},
            events=[told("optimizer_without_gradient", params=["a"], value=10)], end={"t": "end", "idle_steps": 300}),
        "no_gradient", "stepped 300 times.*of the very model that computes the loss"),
    "zero_grad after backward": (
        make_record(
            meta={"t": "meta", "optimizers": ["SGD"], "leaves": 6, "params": params(["a"])},
            events=[told("optimizer_without_gradient", params=["a"], value=10)], end={"t": "end", "idle_steps": 300}),
        "no_gradient", r"Call optimizer.zero_grad\(\) before backward\(\), or after"),
    "a loss that is cut off": (
        make_record(
            meta={"t": "meta", "optimizers": ["SGD"], "leaves": 0, "params": [{"name": "a", "shape": [2], "numel": 2}]},
            events=[told("optimizer_without_gradient", params=["a"], value=10)], end={"t": "end", "idle_steps": 300}),
        "no_gradient", r"Look between the model's output and the loss for detach\(\)"),
    "gradients of 0": (run(flat(), [0.0] * COUNT), "no_gradient", "Every gradient is exactly 0"),
    "half of the model cut off": (
        run(falling(), meta=FLAT_META, tensors=lines([0.0] * 5 + [0.1] * 5, absent=[0, 1, 2, 3, 4])), "no_gradient",
        r"5 of 10 parameters never get a gradient up to layers.4.weight.*detach\(\)"),
    "a group of the optimizer that is frozen": (
        run(falling(), meta={"params": [*params(NAMES[:9]), *params(NAMES[9:], group=1, frozen=True)]},
            tensors=lines([0.1] * 9 + [0.0], absent=[9])), "no_gradient",
        "^Your run learns: .*1 of 10 parameters are frozen, and keep their initial values.*parameter groups 1"),
    "most parameters frozen, of a run that stays where it was": (
        run(flat(), meta={"params": [*params(NAMES[:6], frozen=True), *params(NAMES[6:])]},
            tensors=lines([0.0] * 6 + [0.1] * 4, absent=[*range(6)])),
        "no_gradient", "6 of 10 parameters are frozen, and the others hardly learn"),
    "a group of the optimizer that is thawed half-way": (
        run(falling(), meta={"params": [*params(NAMES[:9]), *params(NAMES[9:], group=1, frozen=True)]},
            tensors=[line | ({"norm": [0.1] * 9 + [0.0], "absent": [9]} if line["i"] < 200 else {})
                     for line in lines(TENTH)]),
        "healthy", "well"),
    "classes in turn": (
        run([2.0, *[9.0 - 8.7 * min(1.0, i % 66 / 30) if i >= 66 else 2.0 - i / 40 for i in range(1, COUNT)]]),
        "data_shift", "one class only"),
    "dead from the start": (
        run(flat(), meta=FLAT_META, tensors=lines([0.0] * 9 + [0.1])), "not_started", "exactly 0 from the first step"),
    "a warm-up longer than the run": (
        run(flat(), lr=[1e-6 * (i + 1) for i in range(COUNT)]), "not_started", "warm-up is longer than the run"),
    "labels of others": (run(flat()), "not_started", "Check that labels belong to their inputs"),
    "vanishing along depth, SGD": (
        run(flat(), meta=FLAT_META, tensors=lines(DEPTH)), "vanishing",
        r"Nothing is learnt below layers.\d.weight: gradients there are \de-\d+ of those above"),
    "vanishing below eps, Adam": (
        run(falling(), optimizer="Adam", eps=1e-8, meta=FLAT_META, tensors=lines([1e-12] * 6 + [0.1] * 4)), "vanishing",
        "below layers.6.weight.*eps is 1e-08"),
    "exploding along depth": (
        run([900.0, *flat(399)], [2e5] * COUNT, meta=FLAT_META, tensors=lines(DEPTH[::-1])), "exploding_depth",
        "smaller weights.*each layer down"),
    "exploding through time": (
        run(flat(), [0.5 if i % 3 else 80.0 for i in range(COUNT)], top=[1, 0.9],
            meta={"params": params(["rnn.weight_ih_l0", "rnn.weight_hh_l0", "head.weight"])},
            tensors=lines([0.1, 0.1, 0.1], weight=8.0)),
        "exploding_time", "rnn.weight_hh_l0 multiplies them.*orthogonal"),
    "data of another kind": (
        run(falling(200) + [3.0 + x for x in falling(200)], calm(200) + [4 * x for x in calm(200)]), "data_shift",
        "data changed at step 200"),
    "weights that grow without end": (
        run([1.0 - i / 400 if i < 200 else 0.5 + (i - 200) / 100 for i in range(COUNT)],
            [x * math.exp(i / 100) for i, x in enumerate(calm())], meta=FLAT_META, tensors=lines(TENTH, grow=6.0)),
        "drift", "step by step"),
    "weights thrown by the first steps of Adam, and a loss that falls all the same": (
        run(falling(end=1.0), optimizer="Adam", eps=1e-8, meta=FLAT_META,
            tensors=moving(lambda i: 4.0 if i < 50 else 20.0)),
        "rate_too_high", "by 0.1, from 0.1 to 0.01.*By step 60 the usual weight had 5.00 times"),
    "weights that begin small and become ordinary": (
        run(falling(end=1.0), optimizer="Adam", eps=1e-8, meta=FLAT_META,
            tensors=moving(lambda i: 0.5 if i < 10 else 2.5)),
        "healthy", "well"),
    "a rate too low beside weights that begin at 0": (
        run(flat(), lr=1e-6, optimizer="Adam", eps=1e-8, meta=FLAT_META,
            tensors=moving(lambda i: [4.0] * 5 + [1e-9 * (i + 1)] * 5, ratio=1e-6)),
        "rate_too_low", "by 1000, to 0.001"),
    "a rate too low, by a loss around 0": (
        run([random.Random(i).gauss(0, 1) for i in range(COUNT)], lr=1e-6, meta=FLAT_META,
            tensors=moving(lambda i: 4.0, ratio=1e-6)),
        "rate_too_low", "weights are where they began"),
    "losses in turns": (run(in_turns(falling())), "healthy", "well"),
    "losses in turns, and a rate that is gone": (
        run(in_turns([1.4 + 0.6 * math.exp(-i / 15) for i in range(COUNT)]), lr=[0.1 / 2 ** (i // 10)
            for i in range(COUNT)]),
        "rate_decayed", "nearly 0 from step 60"),
    "losses in turns, NaN out of nothing": (
        lost(run(in_turns(falling()))), "nonfinite_data", "nothing had grown before"),
    "overflow of float16 where learning begins": (
        lost(run([2.0 - max(0, i - 235) / 15 for i in range(COUNT)], [1.0 + max(0, i - 235) / 5 for i in range(COUNT)]),
             origin=["Sqrt", "float16"]), "nonfinite_range", "overflowed float16"),
    "data that became all one class": (
        run([*falling(200), 3.0, 2.0, 1.0, *[1e-3] * 197]), "data_shift", "leapt to 3.00 at step 200"),
    "data that changed, and were learned anew": (
        run([x + (5 * 0.6 ** (i - 250) if i >= 250 else 0) for i, x in enumerate(falling(end=1.0))]), "data_shift",
        "leapt to .* at step 250, from where it came down step by step"),
    "one batch unlike the others, and a loss that is soon back": (
        run([x + {250: 20.0, 251: 4.0, 252: 2.0}.get(i, 0.0) for i, x in enumerate(falling(end=1.0))]),
        "healthy", "well"),
    "losses in turns, and data that changed": (
        run(in_turns([x * (300 if i >= 250 else 1) for i, x in enumerate(falling())]),
            [x * (40 if i >= 250 else 1) for i, x in enumerate(calm())]),
        "data_shift", "The data changed at step 250"),
    "losses in turns, and batches unlike the others": (
        run(in_turns([x * (300 if i % 60 < 6 and i > 60 else 1) for i, x in enumerate(falling())]),
            [x * (300 if i % 60 < 6 and i > 60 else 1) for i, x in enumerate(calm())]),
        "bad_batches", "every 60 steps"),
    "data that changed, of layers that had small gradients at first": (
        run([*[20 * math.exp(-i / 70) + 1 for i in range(220)], *flat(180, 140.0)], [*calm(220), *[40 * x for x in
            calm(180)]], meta=FLAT_META, tensors=[*lines(DEPTH, count=60), *lines(TENTH)[6:]]),
        "data_shift", "The data changed at step 220"),
    "levels that leap at equal distances and are learned": (
        run([2.0 * math.exp(-(i % 75) / 20) for i in range(COUNT)],
            [x * math.exp(-(i % 75) / 20) for i, x in enumerate(calm())]), "healthy", "well"),
    "a loss that falls below 0 faster and faster": (
        run([1.0 - 0.03 * math.exp(i / 100) for i in range(COUNT)], [x * math.exp(i / 200) for i, x in
            enumerate(calm())]), "drift", "below 0, faster and faster"),
    "labels of others, and large steps of weights that shrink": (
        run([3.0, 2.6, 2.5, *flat(397, 1.6, 0.1)], meta=FLAT_META, tensors=lines(TENTH, 0.15, grow=0.6)), "not_started",
        "Check that labels belong"),
    "a rate that throws weights so far that no gradient is left": (
        run([2.0, 0.5, 0.1, *[0.0] * 397], [1.0, 0.2, 0.1, *[0.0] * 397], lr=2.0, optimizer="Adam", eps=1e-8,
            meta=FLAT_META, tensors=moving(lambda i: 4.0 if i < 5 else 180.0)),
        "rate_too_high", "By step 60 the usual weight"),
    "micro-batches summed, with all signs of a rate too high": (
        run([2.0, 5.0, 20.0, *flat(397, 3.0)], backwards=8, meta=FLAT_META, tensors=lines(TENTH, 0.2, grow=8.0)),
        "accumulation", "8 micro-batches"),
    "a loss that falls below 0 at one pace": (
        run([1.0 - i / 10 for i in range(COUNT)], [x * math.exp(i / 200) for i, x in enumerate(calm())]),
        "drift", "falls below 0, no slower"),
    "a start that is too large in every layer": (
        run(falling(end=1.0), meta=FLAT_META, tensors=lines([10.0 ** (-k / 4) for k in range(10)], weight=12.0)),
        "exploding_depth", "smaller weights"),
    "exploding through time at once": (
        lost(run(flat(), [4e9] * COUNT, meta={"params": params(["f.weight"], shape=(32, 2), uses=15)},
                 tensors=lines([4e9])), 1),
        "exploding_time", "The first gradient has a norm of 4e"),
    "tiny leaps of a loss that is nearly 0": (
        run([x * (5 if i in (340, 360, 385) else 1) for i, x in enumerate(falling(end=0.001, noise=0.0))],
            [x * (15 if i in (340, 360, 385) else 1) for i, x in enumerate(calm())]),
        "healthy", "well"),
    "bad batches that raise all signs of a rate too high": (
        run([x * (300 if i % 61 in (7, 30) else 1) + i / 40 * (i > 60) for i, x in enumerate(falling())],
            [x * (300 if i % 61 in (7, 30) else 1) for i, x in enumerate(calm())], meta=FLAT_META,
            tensors=lines(TENTH, 0.2, grow=8.0)),
        "bad_batches", "very different from the others"),
    "leaps of a run that a rate too high had lost before": (
        run([2.0, 2.1, *[x * (2 if i in (80, 130, 190, 260) else 1) for i, x in enumerate(flat(398, 2.4))]],
            [x * (20 if i in (82, 132, 192, 262) else 1) for i, x in enumerate(calm())], meta=FLAT_META,
            tensors=moving(lambda i: 4.0 if i == 0 else 30.0)),
        "rate_too_high", "is too high"),
    "data that changed, and norms that rise": (
        run([*flat(250, 0.01, 0.3), *[0.3 * (1 + k / 400) * x for k, x in enumerate(flat(150, 1.0, 0.2))]],
            [x * (1 + i / 400) * (6 if i >= 250 else 1) for i, x in enumerate(calm())]),
        "data_shift", "The data changed at step 250"),
    "a loss that falls below 0 faster and faster as one weight grows": (
        run([1.0 - 0.03 * math.exp(i / 100) for i in range(COUNT)], [x * math.exp(-i / 400) for i, x in
            enumerate(calm())], meta=FLAT_META,
            tensors=moving(lambda i: [4.0 * math.exp(i / 350), *[4.0] * 9])),
        "drift", "below 0, faster and faster"),
    "one long step, and all after it short": (
        run([2.0, 2.0, *flat(398, 1.2, 0.02)], meta=FLAT_META,
            tensors=[line | {"update": [4.0] * 10} if line["i"] == 0 else line for line in lines(TENTH)]),
        "healthy", "well"),
    "a loss that a large gradient threw up the step before, and that is learned again": (
        run(THROWN, GROWING), "healthy", "well"),
    "weights that grow while a loss that was thrown up is learned again": (
        run([1.2 * x for x in THROWN], GROWING, meta=FLAT_META,
            tensors=lines(TENTH, grow=6.0)),
        "healthy", "well"),
    "a recurrence whose norms fall to nothing as the loss does": (
        run(falling(end=1e-6, noise=0), [40 * math.exp(-i / 25) for i in range(COUNT)], top=[0, 0.9],
            meta={"params": params(["rnn.weight_hh_l0"])}, tensors=lines([0.1])),
        "healthy", "well"),
    "rewards by a network that is asked ten times for each": (
        run(flat(), [min(1.8, 0.03 * 1.05**i) * x for i, x in enumerate(calm())],
            top=[0, 0.9], meta={"params": params(["f.weight"], shape=(32, 2), uses=10)}, tensors=lines([0.1])),
        "healthy", "well"),
    "harder cases, which a clip makes as short as any step": (
        clipped(1.0, [*falling(200, end=0.05), 3.0, 0.06, *[3.0 if i in HARD else 0.2 for i in range(198)]],
                norms=[*calm(200), 60.0, 1.0, *[60.0 if i in HARD else 1.0 for i in range(198)]]),
        "healthy", "well"),
    "a trained model that goes on in small steps": (
        run(flat(), meta=FLAT_META, tensors=lines(TENTH)), "healthy", "as far as its gradients show"),
    "labels of others, and weights that shrink": (
        run([2.05] * 5 + flat(395, 2.0, 0.002), meta=FLAT_META, tensors=lines(TENTH, 0.02, grow=0.6)), "not_started",
        "Check that labels belong"),
    "a start that is too large, in all but the head, and dies": (
        run([140.0, 36.0, 16.0, *flat(397, 1.8, 0.003)], meta=FLAT_META, tensors=[
            line | {"weight": [12.0] * 9 + [1.0], "norm": [60.0 if line["i"] == 0 else 0.0] * 10}
            for line in lines(TENTH)]),
        "exploding_depth", "5.00 times as large as the weight"),
    "a loss that outliers blur, so that a fall by half would not show": (
        run([1.0] * 5 + [1.8 + 0.9 * random.Random(i).gauss(0, 1) - i / 800 for i in range(395)], meta=FLAT_META,
            tensors=lines(TENTH, 0.02)),
        "healthy", "as far as its gradients show"),
    "labels of others, under noise through which a fall by half would show": (
        run([2.0 + 0.3 * random.Random(i).gauss(0, 1) for i in range(COUNT)], meta=FLAT_META,
            tensors=lines(TENTH, 0.02)),
        "not_started", "Check that labels belong"),
    "labels of others, and an output that was too large at first": (
        run([1.5] * 5 + [1.42] * 15 + flat(380, 1.36, 0.01), meta=FLAT_META,
            tensors=lines(TENTH, 4e-3, grow=0.98)),
        "not_started", "Check that labels belong"),
    "labels of others, which all but the first weight fit at first": (
        run([1.5] * 5 + [1.42] * 15 + flat(380, 1.36, 0.01), meta=FLAT_META,
            tensors=moving(lambda i: [4.0 - i / 4000] + [4.0 + i / 400] * 9, ratio=4e-3)),
        "not_started", "^Nothing has been learned"),
    "a weak signal that is found at once, by weights that grow": (
        run([1.5] * 5 + [1.42] * 15 + flat(380, 1.36, 0.01), meta=FLAT_META,
            tensors=lines(TENTH, 4e-3, grow=1.5)),
        "healthy", "well"),
    "weights and norms that grow while the loss falls out of a plateau": (
        run([1.5 - 0.8 / (1 + math.exp((220 - i) / 20)) for i in range(COUNT)], [x * math.exp(i / 150) for i, x in
            enumerate(calm())], meta=FLAT_META, tensors=moving(lambda i: [4.0] * 9 + [1.3 + i / 150])),
        "healthy", "well"),
    "rewards less their mean, whose loss rises from 0": (
        run([0.03 * (1 - math.exp(-i / 10)) - 0.004 + 0.01 * random.Random(i).gauss(0, 1) for i in range(COUNT)],
            meta=FLAT_META, tensors=lines(TENTH, 3e-3)),
        "healthy", "losses were not judged"),
    "a learning rate that is multiplied in twice": (
        changed(run(falling(), lr=[0.1 * 0.99**i for i in range(COUNT)]),
                lambda step: step.update(update=0.1 * step["lr"] ** 2, over_rule=step["lr"])),
        "update_rule", "the step that the optimizer's rule makes.*multiplied in twice"),
    "another level of a loss that is nearly 0": (
        run([9.0 * math.exp(-i / 20) + 0.02 for i in range(250)] + flat(150, 0.2, 0.1)), "healthy", "well"),
    "another level of a loss that is not": (
        run([9.0 * math.exp(-i / 20) + 0.2 for i in range(250)] + flat(150, 2.0, 0.1)), "data_shift", "step 250"),
    "weights that grow less with gradients that fall, under an energy that comes up again": (
        run([-5.7 * math.sin(min(i, 300) / 240) + 0.02 * max(0, i - 300) for i in range(COUNT)],
            [x * math.exp(-i / 300) for i, x in enumerate(calm())], meta=FLAT_META, tensors=lines(TENTH, grow=17.0)),
        "healthy", "well"),
    "a module that nothing reaches, with gradients of exactly 0": (
        run(falling(), meta=TWO_LAYERS, tensors=lines([0.0, 0.0, 0.1, 0.1])),
        "no_gradient", "2 of 4 parameters never get a gradient up to body.bias"),
    "a weight below a dead activation, beside a bias that learns": (
        run(falling(), meta=TWO_LAYERS, tensors=lines([0.0, 0.0, 0.0, 0.1])),
        "healthy", "well"),
    "a start at zeros that leaves its saddle late": (
        run(flat(200, 2.0, 0.001) + falling(200), meta={"params": params(["a.weight", "b.weight"])}, tensors=[
            {"t": "tensors", "i": i, "norm": [0.1 * (i >= 100), 0.1], "weight": [1.0 * (i >= 100), 4.0],
             "update": [1e-3, 4e-3]} for i in range(0, COUNT, 10)]),
        "not_started", "a.weight, which begins at 0, was exactly 0 in the first steps"),
    "micro-batches summed, whose loss ends above its best": (
        run([1.0 - 0.5 * math.sin(i / 150) for i in range(COUNT)], backwards=4), "accumulation", "4 micro-batches"),
    "a loss that falls below 0 at one pace, under norms that stay": (
        run([0.3 - i / 10 for i in range(COUNT)], meta=FLAT_META,
            tensors=moving(lambda i: [1.0 + i] * 10)),
        "drift", "no slower in the end.*weights grow"),
    "inputs that are constant, so that only biases learn": (
        run(flat(), meta={"params": [*params(["a.weight", "b.weight"]), *params(["a.bias", "b.bias"], (16,))]},
            tensors=[line | {"update": [0.004, 0.004, 0.04, 0.04]} for line in lines([1e-5, 1e-5, 0.1, 0.1])]),
        "not_started", "Check that labels belong"),
    "no warm-up: weights that grow fourfold under a loss that stands still half-way": (
        run([2.7 - 0.7 * min(1.0, i / 60) for i in range(COUNT)], optimizer="AdamW", eps=1e-8, meta=FLAT_META,
            tensors=lines(TENTH, 0.01, grow=4.2)),
        "rate_too_high", "Weights grew to 4.* times their initial size, but the loss has hardly fallen"),
    "a linear probe, which grows while the loss falls on": (
        run(noisy([1.6 - 0.7 * (1 - math.exp(-i / 130)) for i in range(COUNT)]), optimizer="AdamW", eps=1e-8,
            meta={"params": params(NAMES[:1])}, tensors=moving(lambda i: 4.0 + i / 8, 0.01, names=1)),
        "healthy", "well"),
    "a linear probe that a higher rate takes to its best at once": (
        run(noisy([0.8 + 0.8 * math.exp(-i / 25) for i in range(COUNT)]), optimizer="AdamW", eps=1e-8,
            meta={"params": params(NAMES[:1])}, tensors=moving(lambda i: 4.0 + 2 * min(i, 60), 0.03, names=1)),
        "healthy", "well"),
    "a head of two layers on frozen features, which grow while the loss falls": (
        run(noisy([0.85 + 0.7 * math.exp(-i / 40) for i in range(COUNT)]), optimizer="AdamW", eps=1e-8,
            meta={"params": params(NAMES[:2])}, tensors=lines([0.1] * 2, 0.01, grow=4.6)),
        "healthy", "well"),
    "a linear probe whose first steps threw it away, and the loss up": (
        run([0.65, *flat(COUNT - 1, 1.6)], optimizer="AdamW", eps=1e-8,
            meta={"params": params(NAMES[:1])}, tensors=moving(lambda i: 4.0 + 2 * min(i, 60), 0.3, names=1)),
        "rate_too_high", "usual weight had 31.* times its first size"),
    "weights that grow under a heavy-tailed loss whose first value is low by chance": (
        run(HEAVY, meta={"params": params(NAMES[:1])}, tensors=lines([0.1], 0.01, grow=6.5)), "healthy", "well"),
    "weights that grow threefold under a loss that stands still half-way": (
        run([2.7 - 0.7 * min(1.0, i / 60) for i in range(COUNT)], optimizer="AdamW", eps=1e-8, meta=FLAT_META,
            tensors=lines(TENTH, 0.01, grow=3.2)),
        "healthy", "well"),
    "a leap of a loss that the first steps had thrown up": (
        lost(run([2.0, 50.0, *flat(16, 2000.0, 0.5), 2e8, *flat(381, 1e10)],
                 [7.0, *flat(17, 400.0, 0.5), 1e9, *calm(381)]), 24),
        "nonfinite_growth", "grew until"),
    "leaps of a loss that the first steps had thrown up": (
        run([2.0, 50.0, *[x * (60 if i % 40 == 30 else 1) for i, x in enumerate(flat(398, 2000.0, 0.2))]],
            [7.0, 90.0, *[x * (60 if i % 40 == 30 else 1) for i, x in enumerate(calm(398))]],
            meta=FLAT_META, tensors=lines(TENTH, grow=8.0)),
        "rate_too_high", "Weights grew"),
    "data of another level, of a loss that the first steps had thrown up": (
        run([2.0, 50.0, *flat(200, 10.0), *flat(198, 100.0)]), "rate_too_high", "went from 2.00 to"),
    "a loss that is a sum over the batch": (
        run(falling(), [300.0 * x for x in calm()], meta=FLAT_META, tensors=lines([900.0] * 10, weight=3.0)),
        "healthy", "well"),
    "a clip that lets hardly anything move, under a loss that has fallen a little": (
        clipped(0.03, [1.3 + 0.1 * math.exp(-i / 40) + 0.01 * random.Random(i).gauss(0, 1) for i in range(COUNT)],
                meta=FLAT_META, tensors=lines(TENTH, 3e-4)),
        "clip_starves", "multiplies the learning rate by 0.03"),
    "weights that are rounded in the forward": (
        run(falling(), meta={"params": [*params(NAMES[:5]), *params(NAMES[5:], (16,))]},
            tensors=lines([0.0] * 5 + [0.1] * 5)),
        "no_gradient", r"5 of 10 parameters never get a gradient.*round\(\)"),
    "a softmax before the loss": (
        run(flat(level=math.log(16), noise=1e-4), meta=FLAT_META, tensors=lines(TENTH, 3e-4)),
        "not_started", "cross_entropy: logits.*a guess among 16"),
    "a trained model whose loss is not that of a guess": (
        run(flat(level=1.3 * math.log(16), noise=1e-4), meta=FLAT_META, tensors=lines(TENTH, 3e-4)),
        "healthy", "well"),
    "micro-batches summed, and numbers that were lost at once": (
        lost(run([2.0, 5.0, 20.0, *flat(397, 3.0)], backwards=8), 4), "accumulation", "8 micro-batches"),
    "weights thrown far by the first steps of Adam, under a loss that nearly vanishes from there": (
        run(falling(end=0.02), optimizer="Adam", eps=1e-8, meta=FLAT_META,
            tensors=moving(lambda i: 4.0 if i < 10 else 90.0)),
        "rate_too_high", "By step 60 the usual weight had 22.5 times"),
    "weights thrown by the first steps of Adam, under a loss that nearly vanishes from there": (
        run(falling(end=0.02), optimizer="Adam", eps=1e-8, meta=FLAT_META,
            tensors=moving(lambda i: 4.0 if i < 10 else 40.0)),
        "healthy", "well"),
    "a rate that leaps up, and noise that comes of it": (
        run([*falling(200, end=0.4), 12.0, 90.0, *[max(0.5, (1.5 + random.Random(i).random()) * 500 * 0.95**i) for i in
            range(198)]], [*calm(200), *[50 * x for x in calm(200)]], lr=[0.002] * 200 + [0.6] * 200),
        "rate_leapt", "leapt up, at step 200"),
    "a clip that lets hardly anything move, under a loss that falls on": (
        clipped(0.03, [5.0 - i / 100 + 0.03 * random.Random(i).gauss(0, 1) for i in range(COUNT)], meta=FLAT_META,
                tensors=lines(TENTH, 3e-4)),
        "clip_starves", "multiplies the learning rate by 0.03"),
    "a clip that binds always, under a loss that falls on and weights that move": (
        clipped(0.03, [5.0 - i / 100 + 0.03 * random.Random(i).gauss(0, 1) for i in range(COUNT)], meta=FLAT_META,
                tensors=lines(TENTH, 3e-3)),
        "healthy", "well"),
    "a loss that a momentum threw up four steps after a large gradient": (
        run([x + (5 * 0.6 ** (i - 250) if i >= 250 else 0) for i, x in enumerate(falling(end=1.0))],
            [x * (4 if i == 246 else 1) for i, x in enumerate(calm())]),
        "healthy", "well"),
    "inputs that are not normalised": (
        run([9.0, 2e4, *flat(398, 900.0)], [5e3] * COUNT, meta=TWO_LAYERS, tensors=lines([16000.0, 5.0, 40.0, 5.0])),
        "raw_data", "The inputs .* about 800.*mean of 0 and a standard deviation of 1.* or divide pixels by 255"),
    "inputs that are not normalised, of a run that learns": (
        run(falling(), meta=TWO_LAYERS, tensors=lines([16000.0, 5.0, 40.0, 5.0])), "healthy", "well"),
    "inputs that are not normalised, of a loss that falls from where they have put it": (
        run(falling(start=15500.0, end=4.0), meta=TWO_LAYERS, tensors=lines([16000.0, 5.0, 40.0, 5.0])),
        "raw_data", "Your run learns: .* The inputs .* about 800"),
    "inputs so large that the first activation is saturated": (
        run(flat(), meta=THREE_LAYERS, tensors=lines([0.0, 0.0, 8.0, 1.0, 4.0, 1.0])),
        "raw_data", "so large that the first activation is saturated"),
    "a first activation that gives a sign without a gradient": (
        run(flat(), meta=THREE_LAYERS, tensors=lines([0.0, 0.0, 4.0, 1.0, 4.0, 1.0])),
        "no_gradient", "never get a gradient"),
    "inputs before a normalisation, whose bias has no gradient but for rounding": (
        run(flat(), meta=TWO_LAYERS, tensors=lines([10.0, 1e-7, 1.0, 1.0])), "healthy", "well"),
    "a rate that is gone, and inputs before a normalisation that are rounded less": (
        run(flat(), lr=[0.1 / 2 ** (i // 10) for i in range(COUNT)], meta=TWO_LAYERS,
            tensors=lines([10.0, 2e-5, 1.0, 1.0])), "rate_decayed", "nearly 0"),
    "outputs that are large, whatever the targets are": (
        lost(run([1e6, *[1e6 * 10.0 ** i for i in range(1, 9)], *flat(391)], [2e3] * COUNT, meta={"params": [
            *params(["a.weight"], (1, 16)), *params(["a.bias"], (1,))]}, tensors=lines([4 * 9e5, 1800.0])), 9),
        "nonfinite_growth", "grew until"),
    "a loss that rises at first as its targets are made by an older copy": (
        run([0.7, 0.4, 1.1, 1.2, 1.0, *noisy([1.9] * 5, 0.05), *[2.6] * 2, *noisy(falling(388, 1.6, 0.5))], calm(),
            meta=FLAT_META, tensors=lines(TENTH)), "healthy", "well"),
    "a rate too high whose first steps climb to a leap": (
        run([2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.1, 2.5, 4.0, 20.0, 9e3, *flat(388, 3e4, 0.3)],
            [*[1.0] * 7, 2.0, 4.0, 9.0, 100.0, 2e3, *[x * 1e3 for x in calm(388)]], meta=FLAT_META,
            tensors=moving(lambda i: 4.0 if i < 10 else 300.0)),
        "rate_too_high", "is too high"),
    "a rate that leaps up, and numbers that are lost at once": (
        lost(run([*falling(200, end=0.4), 1.1, 2.9, *flat(198)], [*calm(200), *[4 * x for x in calm(200)]],
                 lr=[0.002] * 200 + [0.6] * 200), 202),
        "rate_leapt", "leapt up, at step 200"),
    "inputs that are not normalised, of a loss that comes down from far above and past its best": (
        run([*[2e9 * 0.7**i for i in range(50)], *flat(10, 17.0), *flat(340, 60.0)], [5e3] * COUNT, meta=TWO_LAYERS,
            tensors=lines([16000.0, 5.0, 40.0, 5.0])),
        "raw_data", "The inputs .* about 800"),
    "weights thrown by the first steps of Adam, under a loss that crosses 0": (
        run(falling(start=0.7, end=-2.2), optimizer="Adamax", eps=1e-8, meta=FLAT_META,
            tensors=moving(lambda i: 4.0 if i < 10 else 40.0)),
        "rate_too_high", "By step 60 the usual weight had 10"),
    "numbers lost on the way down from where the first steps had thrown the loss": (
        lost(run([0.7, 36.0, *[7e3 - 250 * i for i in range(26)], *flat(372)], [0.9, 289.0, *calm(398)]), 28),
        "nonfinite_growth", "grew until"),
    "a table that a choice cuts off, before a model that learns": (
        run(falling(), meta={"params": params(["codes.weight", *NAMES[1:]], shape=(64, 16))},
            tensors=lines([0.0, *TENTH[1:]], absent=[0])),
        "no_gradient", "1 of 10 parameters never get a gradient up to codes.weight"),
    "a part that is in no optimizer and may be meant to stay, beside one that the forward leaves out": (
        run(falling(), meta=FLAT_META, tensors=lines([*TENTH[:9], 0.0], absent=[9]),
            events=[told("gradient_without_optimizer", severity="info", params=["new.weight"], value=20)]),
        "no_gradient", "1 of 10 parameters never get a gradient"),
    "a reward for entropy, of a spread beside a policy that is used in ten moments": (
        run([1.0 - 0.75 * i for i in range(COUNT)], [249.0 * norm**0.03 for norm in calm()],
            meta={"params": [*params(["0.weight", "2.weight"], uses=10), *params(["spread"], (1,))]},
            tensors=[{"t": "tensors", "i": i, "norm": [0.2, 0.5, 249.0], "weight": [4.0, 4.0, 0.003 * i],
                      "update": [4e-3, 4e-3, 3e-3]} for i in range(0, COUNT, 50)]),
        "drift", "no slower in the end, to -2.*while the weights grow"),
    "a loss that fell by a tenth": (
        run([*[2.08 - i / 500 for i in range(100)], *flat(COUNT - 100, 1.88, 0.01)]), "healthy",
        "^Your run is well as far as its record shows; its loss went from 2.*whether there is more to learn.*"
        "of one answer for all samples"),
    "a loss that fell by a tenth and still falls": (
        run(falling(start=2.08, end=1.88, noise=0.01)), "healthy", "^Your run is well. Nothing has to be fixed"),
    "a part of the model that was replaced after the optimizer was made": (
        run(falling(), meta=FLAT_META, tensors=lines([*TENTH[:9], 0.0], absent=[9]),
            events=[told("gradient_without_optimizer", severity="warning", params=["new.weight"], value=20)]),
        "no_gradient", "The optimizer holds layers.9.weight, which never get a gradient, but not new.weight"),
    "a loss that takes a softmax of a softmax, though it falls": (
        run(falling(start=2.1, end=1.9, noise=0.01), meta={"doubled": ["LogSoftmax", "Softmax"]}),
        "not_started", "gets probabilities where it expects logits: Softmax is applied before the loss"),
    "a loss that falls further than one of a softmax of a softmax can": (
        run(falling(), meta={"doubled": ["LogSoftmax", "Softmax"]}), "healthy", "^Your run is well"),
    "a loss without a floor that ends in numbers that are lost": (
        lost(run([2.0 - math.exp(i / 20) for i in range(COUNT)], [math.exp(i / 40) for i in range(COUNT)]), NAN_AT),
        "drift", "falls below 0"),
    "a loss a million times below 0": (
        run([2.0 - min(1e8, math.exp(min(i, 60) / 3)) for i in range(COUNT)]), "drift", "without a floor in sight"),
    "first steps that raised a loss which fell below its start": (
        run([1.0, 1.0, 1.0, *flat(3, 2.5, 0.02), *flat(COUNT - 6, 0.8, 0.02)],
            [1.0, 1.0, 1.0, *flat(3, 5.0), *calm(COUNT - 6)]),
        "healthy", "well"),
    "a loss without a floor, under a rate that decays": (
        run([-math.exp(i / 30) if i < 200 else -(math.exp(200 / 30) + 20 * (i - 200) - (i - 200) ** 2 / 25)
             for i in range(COUNT)], [x * math.exp(min(i, 300) / 40) for i, x in enumerate(calm())]),
        "drift", "without a floor in sight"),
    "a weak signal under noise, found by weights that read the data and grow": (
        run([2.11] * 20 + flat(380, 2.0, 0.06), meta=FLAT_META, tensors=lines(TENTH, 0.02, grow=1.3)),
        "healthy", "as far as its gradients show"),
    "targets that are not normalised": (
        lost(run([1e6, *[1e6 * 10.0 ** i for i in range(1, 9)], *flat(391)], [2e3] * COUNT, meta={"params": [
            *params(["a.weight"], (1, 16)), *params(["a.bias"], (1,))]}, tensors=lines([4500.0, 1800.0])), 9),
        "raw_data", r"The targets .* about 1,000.*as in \(x - mean\) / std\. Choose the learning rate"),
    "outputs that are large by the weights of three layers, whatever the targets are": (
        run(falling(start=14000.0, end=11000.0), meta=THREE_LAYERS, tensors=LARGE_WEIGHTS),
        "exploding_depth", "times as large as the weight"),
    "a start that is too large in each of three layers, under a loss that falls": (
        run(falling(start=7e3, end=2.5e3), meta=THREE_LAYERS, tensors=LARGE_WEIGHTS),
        "exploding_depth", "too large from the start"),
    "a large table before a small head, under a loss that sums over the batch": (
        run(falling(), meta={"params": [*params(["table.weight"], (100, 64)), *params(["head.weight"], (4, 64))]},
            tensors=[line | {"weight": [80.0, 1.2], "norm": [500.0, 64.0]} for line in lines([0.0, 0.0])]),
        "healthy", "well"),
    "steps to and fro at a rate too high, which carry weights away": (
        run(RISES_FAR, [x * 1.01**i for i, x in enumerate(calm())], meta=FLAT_META,
            tensors=moving(lambda i: 4.0 + i / 20, ratio=0.1)),
        "rate_too_high", "is too high"),
    "weights that are pulled one way by what rewards large ones": (
        run(RISES_FAR, [x * 1.01**i for i, x in enumerate(calm())], meta=FLAT_META,
            tensors=moving(lambda i: 4.0 + i / 20, ratio=0.01)),
        "drift", "a penalty or weight_decay with the wrong sign"),
}  # fmt: skip


RISES_AGAIN = [1.0 - i / 400 if i < 200 else 0.5 + (i - 200) / 400 for i in range(COUNT)]


@pytest.mark.parametrize(
    ("weight_of", "drifts"),
    [(lambda i: 4.0 * (5 - 4 * math.exp(-i / 60)), False), (lambda i: 4.0 + i / 25, True)],
    ids=["settles", "goes on"],
)
def test_a_weight_that_grows_is_a_drift_where_it_does_not_settle(weight_of, drifts):
    found = diagnose(run(RISES_AGAIN, meta=FLAT_META, tensors=moving(weight_of)))
    assert ("drift" in [cause.key for cause in found.causes]) is drifts


@pytest.mark.parametrize(("record", "key", "words"), CASES.values(), ids=CASES)
def test_causes(record, key, words):
    found = diagnose(record)
    said = " ".join([found.sentence, found.cause.advice, *(one.words for one in found.cause.evidence)])
    assert found.cause.key == key, [(cause.key, cause.certainty) for cause in found.causes]
    assert re.search(words, said), said
    assert diagnose(record) == found


def test_every_key_has_a_case():
    assert {key for _, key, _ in CASES.values()} == set(KEYS)


@pytest.mark.parametrize("record", [case[0] for case in CASES.values()], ids=CASES)
def test_every_cause_is_said_in_whole_sentences(record):
    for cause in diagnose(record).causes:
        said = [cause.sentence, cause.advice, *cause.rules_out, *(one.words for one in cause.evidence)]
        assert all(text[0].isupper() or text[0].isdigit() for text in said), said
        assert all(text.endswith(".") for text in said), said
        assert not any("  " in text or ";;" in text or ".." in text for text in said), said
        assert cause.evidence or cause.key == "unknown"
        assert all(one.steps[0] <= one.steps[1] for one in cause.evidence)
        assert len({cause.key for cause in diagnose(record).causes}) == len(diagnose(record).causes)


def test_a_symptom_is_a_remark_where_the_run_is_well_and_a_warning_where_it_is_not():
    clipped = {"threshold": 1e-3, "coefficient": 1e-3, "rule": "norm"}
    well, sick = run(falling(), **clipped), run(flat(), lr=0.0, **clipped)
    for record, severity in ((well, "info"), (sick, "warning")):
        (before,) = [one for one in findings(record) if one.kind == "clipping_always_on"]
        (found,) = [one for one in weighed_findings(record) if one.kind == "clipping_always_on"]
        assert (before.severity, found.severity) == ("warning", severity)
    assert diagnose(well).is_well


@pytest.mark.parametrize("name", ["clip that is the rate", "clip below eps"])
def test_a_clip_that_is_the_cause_has_one_advice(name):
    (told,) = [one for one in weighed_findings(CASES[name][0]) if one.kind == "clipping_always_on"]
    assert told.advice == "follow the diagnosis, which says what to do about this clip"


@cache
def all_records():
    """Every record that the tests of this folder judge."""
    import test_json_summary
    import test_recommend

    made = {f"cause: {name}": case[0] for name, case in CASES.items()}
    return made | {f"decision: {name}": case[0] for name, case in test_recommend.DECISIONS.items()}, test_json_summary


DENIED = {  # what a page may rule out, by its words, and what may not stand beside it
    r"layer lacks a gradient": r"(never|no longer|at all).*gradient|(get|had) no gradient|gradient.* exactly 0",
    r"gradient vanishes or explodes|do not vanish": r"[Vv]anish|[Ee]xplode|Nothing is learnt (below|across)",
    r"[Nn]o (batch|single batch|bad batch|bad sample)": r"very different from the others|norm.* times .*neighbour",
    r"(?<!No )learning rate (is not the cause|may be right)": r"earning rate.* (is too (high|low)|leapt|nearly 0)",
    r"data are not the cause": r"The data changed|very different from the others",
    r"no bad operation": r"overflowed|the cause is the batch",
}


def check_what_is_ruled_out(record):
    for part in by_optimizer(record):
        found = diagnose(part.record)
        beside = [cause.sentence for cause in found.causes[1:]]
        if found.is_well:
            beside += [one.message for one in findings(part.record)]
            beside += ["a batch is very different from the others"] * bool(spikes_of(part.record))
        for said in found.cause.rules_out:
            for denied, words in DENIED.items():
                assert not re.search(denied, said) or not any(re.search(words, one) for one in beside), (said, beside)


def check_no_contradiction(record):
    check_what_is_ruled_out(record)
    found, made = diagnose(record), recommend(record)
    errors = [one for one in findings(record) if one.severity == "error"]
    parts = [recommend(part.record) for part in by_optimizer(record)]
    for one in [made, *parts]:
        assert one.kind not in ("keep", "nothing") or not errors, (one.headline, errors)
    if errors:
        assert not found.is_well, errors
    if made.kind in ("keep", "nothing"):
        assert found.cause.key == "healthy"
    if found.is_well:
        assert not any(one.severity != "info" and one.kind in SYMPTOMS for one in weighed_findings(record))
    if found.cause.key not in ("healthy", "unknown"):
        assert made.kind in ("fix", "constant", "unknown")


LEFT_OUT = [{"t": "tensors", "i": i, "norm": [1.0, 1.0, None], "absent": [2]} for i in range(0, COUNT, 5)]
MEASURED = [{"t": "tensors", "i": i, "norm": [1.0, 1.0, 1.0]} for i in range(0, COUNT, 5)]
THREE = {"params": params(NAMES[:3])}
NO_GAP, NO_TREND, NO_BATCH = "No layer lacks a gradient.", "No gradient vanishes or explodes.", "No batch stands out."


@pytest.mark.parametrize(
    ("norms", "tensors", "said"),
    [
        (calm(), MEASURED, (NO_GAP, NO_TREND, NO_BATCH)),
        (calm(), [], (NO_TREND, NO_BATCH)),
        (calm(), LEFT_OUT, (NO_TREND, NO_BATCH)),
        ([x * (3000 if i == 200 else 1) for i, x in enumerate(calm())], MEASURED, (NO_GAP, NO_TREND)),
    ],
    ids=["measured", "not measured", "a parameter without a gradient", "one batch behind a clip"],
)
def test_a_run_that_is_well_rules_out_only_what_it_shows(norms, tensors, said):
    record = run(falling(), norms, tensors=tensors, meta=THREE)
    if max(norms) > 1000:
        clip = {"threshold": 2.0, "rule": "norm"}
        record = changed(record, lambda step: step.update(clip, coefficient=min(1.0, 2.0 / step["norm"])))
    assert diagnose(record).is_well
    assert diagnose(record).cause.rules_out == said
    check_no_contradiction(record)


def test_nothing_is_kept_and_nothing_left_alone_beside_an_error(tmp_path):
    records, summaries = all_records()
    assert len(records) > 60
    for record in records.values():
        check_no_contradiction(record)
    for name, make in summaries.RECORDS.items():
        (tmp_path / name).mkdir()
        check_no_contradiction(make(tmp_path / name))
    for k, write in enumerate((write_char_rnn, write_gan, write_sick)):
        check_no_contradiction(write(tmp_path / f"{k}.jsonl"))


@pytest.mark.parametrize("seed", range(30))
def test_no_record_is_contradicted(seed):
    """Records of any shape: curves, leaps, gaps, zeros and what is not finite, drawn at random."""
    draw = random.Random(seed)
    count = draw.choice([0, 3, 40, 120, 500])
    scale = 10.0 ** draw.uniform(-12, 12)
    slope = draw.uniform(-0.03, 0.03)
    norms = [scale * math.exp(slope * i + draw.gauss(0, draw.choice([0.1, 1.0]))) for i in range(count)]
    losses = [draw.choice([1.0, -1.0]) * abs(draw.gauss(2, 0.3)) * math.exp(slope * i) for i in range(count)]
    norms = [draw.choice([None, 0.0, 1e6 * norm]) if draw.random() < 0.02 else norm for norm in norms]
    tensors = [
        {"t": "tensors", "i": i, "norm": [abs(draw.gauss(0, 1)) * 10.0 ** draw.uniform(-20, 5) for _ in range(6)]}
        for i in range(0, count, 5)
    ]
    optimizer, eps = draw.choice([("SGD", None), ("Adam", 1e-8)])
    record = run(
        losses, norms, lr=draw.choice([0.0, 0.1, 1e-6]), optimizer=optimizer, eps=eps, tensors=tensors,
        meta={"params": params(NAMES[:6])},
    )  # fmt: skip
    check_no_contradiction(record)
    for row in CAUSES:
        assert row.sign.__doc__
    assert recommend(record).headline.endswith(".")


@pytest.mark.parametrize("record", [case[0] for case in CASES.values()], ids=CASES)
def test_the_surest_cause_leads_and_of_those_as_sure_the_first_of_the_table(record):
    places = [(CERTAINTIES.index(cause.certainty), KEYS.index(cause.key)) for cause in diagnose(record).causes]
    whole = places if diagnose(record).cause.key not in ("healthy", "unknown") else places[1:]
    several = bool(diagnose(record).parts)
    assert [sure for sure, _ in whole] == sorted(sure for sure, _ in whole)
    assert several or whole == sorted(whole)


def test_of_two_signs_of_one_cause_the_surest_is_told():
    """A part that never gets a gradient is only possible where it is small; one that is in no optimizer is likely."""
    idle = lines([*TENTH[:9], 0.0], absent=[9])
    found = diagnose(run(falling(), meta={"params": [*params(NAMES[:9]), *params(NAMES[9:], (2, 2))]}, tensors=idle))
    assert [(one.key, one.certainty) for one in found.causes] == [("healthy", "likely"), ("no_gradient", "possible")]
    started = {"doubled": ["LogSoftmax", "Softmax"]} | FLAT_META
    found = diagnose(run(flat(), meta=started, tensors=lines(TENTH)))
    assert (found.cause.key, found.cause.certainty) == ("not_started", "certain")


def test_an_error_without_a_known_cause_is_no_healthy_run():
    record = run(falling(), events=[told("optimizer_without_gradient", params=["a"], value=300)])
    assert any(one.severity == "error" for one in findings(record))
    assert not diagnose(record).is_well
    assert recommend(record).kind in ("fix", "unknown")


def test_what_is_usual_is_the_recent_past():
    """Logits that overflow at a norm far above the first ones, which had grown in a warm-up: no explosion."""
    norms = [x * min(1.0, 0.02 + i / 100) for i, x in enumerate(calm())]
    record = lost(run(falling(), norms, meta={"compute": ["float16"]}))
    assert diagnose(record).cause.key == "nonfinite_range"


@pytest.mark.parametrize(
    ("places", "period"),
    [([39, 79, 119, 159], 40), ([39, 79, 81, 119, 159, 199], 40), ([10, 20, 31, 40, 55], None), ([5, 9], None),
     ([], None), ([50, 150, 250, 350, 352], 100)],
)  # fmt: skip
def test_periods(places, period):
    assert period_of(places) == period


# --- several optimizers -----------------------------------------------------------------------------------------------


def two_trainings(second=None):
    """One training after the other: the first optimizer has no number, since it was alone when it stepped."""
    first, later = falling(), falling(seed=3) if second is None else second
    steps = steps_of(calm() + calm(seed=4), lr=0.1)
    for i, (step, loss) in enumerate(zip(steps, first + later, strict=True)):
        step["loss"] = loss
        if i >= COUNT:
            step["optimizer"] = 1
    return make_record(meta={"t": "meta", "optimizers": ["SGD"], "argv": ["cv.py"]}, steps=steps)


@pytest.mark.parametrize("seed", range(20))
def test_a_first_batch_whose_loss_is_small_by_chance_is_no_rate_that_is_too_high(seed):
    """The first of batches of very unequal losses lies far below those of the next steps, which fall all the same."""
    draw = random.Random(seed)
    means = [0.5 * math.exp(-i / 150) + 0.05 for i in range(COUNT)]
    losses = [0.1, *(mean * math.exp(draw.gauss(-0.4, 0.9)) for mean in means[1:])]
    assert diagnose(run(losses, lr=0.01)).cause.key == "healthy"


def test_two_trainings_one_after_the_other_are_two_runs():
    record = two_trainings()
    assert [part.label for part in by_optimizer(record)] == ["optimizer 0 (SGD)", "optimizer 1 (that came later)"]
    assert diagnose(record).is_well
    sick = diagnose(two_trainings([2.0, 9.0, 30.0, 12.0, *flat(396, 2.4, 0.05)]))
    assert sick.cause.key == "rate_too_high"
    assert sick.sentence.startswith("Optimizer 1 (that came later): The learning rate")


DECAYED = [1.4 + 0.6 * math.exp(-i / 15) for i in range(COUNT)], [0.1 / 2 ** (i // 10) for i in range(COUNT)]
LEARNS = r"Your run learns: its loss fell from 1.93 to 1.40. What may stand in its way: "


def test_a_likely_cause_of_a_run_that_learns_begins_with_its_progress():
    found = diagnose(run(DECAYED[0], lr=DECAYED[1]))
    assert re.match(LEARNS + "The learning rate was nearly 0", found.sentence)
    assert diagnose(run(falling())).progress == diagnose(run(flat(), lr=0.0)).progress == ""


def test_a_loss_that_fell_to_a_guess_at_once_is_not_said_to_learn():
    guess = [1.45, 1.44, 1.43, 1.42, 1.40, *flat(395, 1.386, 0.002)]
    found = diagnose(run(guess, meta=FLAT_META, tensors=lines(DEPTH)))
    assert found.cause.key == "vanishing"
    assert found.progress == ""


DETACHED = [{"t": "tensors", "i": i, "norm": [0.1] * 10, "absent": [4] * (i >= 150)} for i in range(0, COUNT, 5)]


@pytest.mark.parametrize(("losses", "kind"), [(falling(800)[:400], "unknown"), (falling(), "fix")])
def test_layers_that_are_frozen_are_asked_for_where_the_run_goes_on_well(losses, kind):
    losses = [loss if i < 150 or kind == "unknown" else losses[150] for i, loss in enumerate(losses)]
    record = run(losses, meta=FLAT_META, tensors=DETACHED)
    found, made = diagnose(record), recommend(record)
    assert (found.cause.key, made.kind) == ("no_gradient", kind)
    assert bool(found.progress) is (kind == "unknown")
    assert made.headline == "If they were frozen at step 150 on purpose, do nothing."


def test_progress_is_told_of_several_optimizers_unless_one_of_them_does_not_learn():
    record = changed(
        two_trainings(DECAYED[0]), lambda step: step.update(lr=DECAYED[1][step["i"] - COUNT]), slice(COUNT, None)
    )
    assert re.match(LEARNS + r"Optimizer 1 \(that came later\): The learning rate was", diagnose(record).sentence)
    stuck = changed(record, lambda step: step.update(lr=0.0, loss=2.0), slice(0, COUNT))
    assert diagnose(stuck).progress == ""


def test_losses_of_networks_that_work_against_each_other_are_not_judged():
    steps = steps_of(calm(800), lr=0.1)
    for i, step in enumerate(steps):
        step |= {"optimizer": i % 2, "loss": 1.0 + i / 100}
    record = make_record(meta={"t": "meta", "optimizers": ["Adam", "Adam"]}, steps=steps)
    assert diagnose(record).is_well
    assert [one.cause.key for _, one in diagnose(record).parts] == ["healthy", "healthy"]


def one_loss_for_two(losses, rate_of):
    """Two optimizers, each of other parameters, that step one after the other on one backward, as Muon and AdamW."""
    steps = steps_of(calm(2 * len(losses)), lr=0.1)
    for i, step in enumerate(steps):
        step |= {"optimizer": i % 2, "lr": rate_of(i // 2)}
        if i % 2 == 0:
            step["loss"] = losses[i // 2]
    return make_record(meta={"t": "meta", "optimizers": ["Muon", "AdamW"]}, steps=steps)


def test_one_loss_that_two_optimizers_share_is_judged():
    assert diagnose(one_loss_for_two(falling(), lambda i: 0.1)).sentence == "Your run is well."
    sick = diagnose(one_loss_for_two(DECAYED[0], DECAYED[1].__getitem__))
    assert (sick.cause.key, sick.cause.optimizer) == ("rate_decayed", "optimizer 0 (Muon)")


def test_rates_of_two_optimizers_that_leap_are_both_named():
    losses = [*falling()[:200], *(50.0 + 0.1 * i for i in range(200))]
    found = diagnose(one_loss_for_two(losses, lambda i: 0.01 if i < 200 else 1.0))
    named = {cause.optimizer for cause in found.causes if "where the learning rate leapt up" in cause.sentence}
    assert named == {"optimizer 0 (Muon)", "optimizer 1 (AdamW)"}


def test_a_training_without_losses_has_not_those_of_the_one_before():
    record = changed(two_trainings(falling()), lambda step: step.pop("loss"), slice(COUNT, None))
    assert sum(loss is not None for loss in by_optimizer(record)[1].record.steps.column("loss")) == 1


# --- a decision that was followed -------------------------------------------------------------------------------------

BEFORE = {
    "record": "runs/first/run.jsonl",
    "cause": "rate_too_high",
    "rule": "norm=0.1",
    "loss": 2.0,
    "error": 0.1,
    "steps": COUNT,
}


@pytest.mark.parametrize(
    ("followed", "losses", "words"),
    [
        (
            BEFORE,
            falling(),
            r"^Compared with runs/first/run.jsonl.*rate too high.*advice helped: .*in place of 2.00.*Your run is well",
        ),
        (BEFORE | {"loss": 0.1}, falling(), "the advice did harm: the loss is 0.2.* in place of 0.1"),
        (BEFORE | {"loss": 2.01}, flat(), "made no measurable difference: .*±"),
        (BEFORE | {"lost": True}, falling(), "the advice helped: the loss is finite"),
        (BEFORE | {"cause": "healthy"}, falling(), "^Your run is well"),
        ({}, falling(), "^Your run is well"),
    ],
)
def test_a_run_that_followed_is_told_whether_it_helped(followed, losses, words):
    assert re.search(words, diagnose(run(losses, meta={"followed": followed})).sentence)


def test_a_clip_that_was_followed_and_helped_is_not_told_to_be_fixed_again():
    losses = [2.0 - i / 500 for i in range(COUNT)]
    assert diagnose(clipped(0.1, losses, norms=[10.0] * COUNT)).cause.key == "clip_starves"
    found = diagnose(clipped(0.1, losses, norms=[10.0] * COUNT, meta={"followed": BEFORE | {"loss": 30.0}}))
    assert "the advice helped" in found.sentence
    assert found.cause.key == "healthy"


@pytest.mark.parametrize("rate", [None, 0.1])
def test_a_run_that_is_lost_at_its_first_update_is_lost_by_growth_whether_its_rate_is_known_or_not(rate):
    steps = steps_of([1.0] + [None] * 59)
    for i, step in enumerate(steps):
        step |= {"loss": None if i else 2.0} | ({} if rate is None else {"lr": rate})
    assert diagnose(make_record(steps=steps)).causes[0].key == "nonfinite_growth"


def test_a_record_with_updates_and_no_weights_is_read():
    odd = [{"t": "tensors", "i": i, "norm": [0.1], "update": [0.1]} for i in range(0, 300, 10)]
    record = run(falling(), tensors=odd)
    assert diagnose(record).causes[0].key == "healthy"
