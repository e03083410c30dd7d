"""Records made up from a seed, so that reports can be tested without training anything."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradguard.monitoring.record.file import Record, RecordWriter, read_record

PARAMETERS = {
    "embedding.weight": (65, 64),
    "rnn.weight_ih_l0": (256, 64),
    "rnn.weight_hh_l0": (256, 256),
    "rnn.bias_ih_l0": (256,),
    "rnn.weight_ih_l1": (256, 256),
    "rnn.weight_hh_l1": (256, 256),
    "head.weight": (65, 256),
    "head.bias": (65,),
}
WEIGHTS = (0.10, 0.25, 0.62, 0.08, 0.35, 0.48, 0.40, 0.12)


def make_record(**parts: Any) -> Record:
    """A record straight from its parts, for tests that need only some of them."""
    empty = {"path": Path("run.jsonl"), "meta": {"t": "meta"}, "steps": [], "tensors": [], "events": []}
    return Record(**(empty | {"end": None, "torn": False} | parts))


def changed(record: Record, change: Callable[[dict[str, Any]], object], places: slice = slice(None)) -> Record:
    """The record with other steps: ``change`` has been called with some of them."""
    steps = list(record.steps)
    for step in steps[places]:
        change(step)
    return replace(record, steps=steps)


def steps_of(norms: list[float | None], **more: Any) -> list[dict[str, Any]]:
    """One step per norm; every other field is the same on all of them."""
    return [{"t": "step", "i": i, "norm": norm} | more for i, norm in enumerate(norms)]


def log_normal(count: int, *, centre: float = 1.0, spread: float = 0.3, seed: int = 0) -> list[float]:
    """Norms of a calm run."""
    generator = random.Random(seed)
    return [centre * math.exp(generator.gauss(0, spread)) for _ in range(count)]


def write_char_rnn(
    path: Path, *, steps: int = 600, threshold: float | None = None, seed: int = 0, every: int = 4
) -> Record:
    """Write and read back a run of a character RNN: norms decay and spike, and spikes that pass cost loss."""
    with RecordWriter(path) as writer:
        writer.write("meta", **_meta(threshold))
        _write_steps(writer, steps, threshold, random.Random(seed), every)
        writer.write("end", steps=steps, wall=0.1 * steps, overhead_ms=0.5 * steps, exit=0, interrupted=False)
    return read_record(path)


def _meta(threshold: float | None) -> dict[str, Any]:
    return {
        "version": "0.1.0",
        "torch": "2.13.0",
        "device": "cpu",
        "argv": ["examples/char_rnn.py", "--steps", "600"],
        "clip": None if threshold is None else f"norm={threshold:g}",
        "optimizers": ["SGD"],
        "params": [
            {"name": name, "shape": list(shape), "numel": math.prod(shape), "dtype": "float32", "group": 0}
            for name, shape in PARAMETERS.items()
        ],
    }


def _write_steps(
    writer: RecordWriter, steps: int, threshold: float | None, generator: random.Random, every: int
) -> None:
    loss, damage = 4.17, 0.0
    for i in range(steps):
        spike = generator.random() < 0.013 and i > 30
        scales = _tensor_norms(generator, i / max(steps, 1), 50 * generator.random() + 15 if spike else 1.0)
        norm = math.sqrt(sum(value * value for value in scales))
        coefficient = 1.0 if threshold is None else min(1.0, threshold / norm)
        loss += (1.45 - loss) * 4.0 / steps
        damage = 0.985 * damage + 0.012 * math.log1p(norm * coefficient) * (norm * coefficient > 3)
        top = max(range(len(scales)), key=scales.__getitem__)
        clipped = {"coefficient": coefficient, "threshold": threshold, "rule": "norm"} if threshold else {}
        writer.write(
            "step", i=i, wall=0.1 * i, loss=loss + 8 * damage + generator.gauss(0, 0.05), lr=0.5, norm=norm,
            post_norm=norm * coefficient, top=[top, scales[top] ** 2 / norm**2], **clipped,
        )  # fmt: skip
        if i % every == 0 or spike:
            writer.write("tensors", i=i, norm=scales)
        if spike:
            message = f"gradient norm {norm:.3g}, {norm / 0.5:.0f} times the usual"
            writer.write("event", i=i, kind="spike", severity="warning", message=message, advice="Clip it.")


def _tensor_norms(generator: random.Random, progress: float, spike: float) -> list[float]:
    level = 0.35 + 1.2 * math.exp(-8 * progress)
    common = math.exp(generator.gauss(0, 0.18))
    recurrent = [spike if "_hh_" in name else spike**0.6 for name in PARAMETERS]
    return [
        level * common * weight * factor * math.exp(generator.gauss(0, 0.15))
        for weight, factor in zip(WEIGHTS, recurrent, strict=True)
    ]


def write_sick(path: Path, *, steps: int = 400, threshold: float = 0.1, seed: int = 0) -> Record:
    """Write and read back a run in which everything goes wrong: it always clips, explodes, dies and ends in NaN.

    The bias of the head is dead, the first recurrent weight dies half-way, three steps are not finite, the loss scale
    collapses. Weights and updates are recorded on every tenth step.
    """
    generator = random.Random(seed)
    with RecordWriter(path) as writer:
        writer.write(
            "meta", **_meta(threshold) | {"schema": 1, "world": 4, "mesh": {"dp": 2, "tp": 2}, "git": "35a8653+"}
        )
        for i in range(steps):
            norms = _sick_norms(generator, i, steps)
            norm = math.sqrt(sum(value * value for value in norms))
            lost = sum(not math.isfinite(value) for value in norms)
            clipped = {} if lost else {"coefficient": min(1.0, threshold / norm), "post_norm": min(norm, threshold)}
            loss = math.nan if lost else 2.0 + i / steps
            writer.write(
                "step", i=i, wall=0.1 * i, loss=loss, lr=0.1, norm=norm, nonfinite=lost,
                threshold=threshold, rule="norm", amp_scale=65536 / 2 ** (i // 20), skipped=True if lost else None,
                **clipped,
            )  # fmt: skip
            extras = {"weight": [1.0 + place for place in range(8)], "update": [0.001 * value for value in norms]}
            writer.write("tensors", i=i, norm=norms, **(extras if i % 10 == 0 else {}))
            if lost:
                writer.write(
                    "event", i=i, kind="nonfinite", severity="error", message="gradients of head.weight are not finite",
                    advice="find the operation (docs/nan.md says how)", params=["head.weight"],
                )  # fmt: skip
        writer.write("end", steps=steps, wall=0.1 * steps, overhead_ms=20.0 * steps, exit=1, interrupted=False)
    return read_record(path)


def _sick_norms(generator: random.Random, i: int, steps: int) -> list[float]:
    level = 2.0 * (50.0 if i > 0.8 * steps else 1.0)
    norms = [level * weight * math.exp(generator.gauss(0, 0.2)) for weight in WEIGHTS]
    norms[-1] = 0.0
    if i > steps // 2:
        norms[1] = 0.0
    if i in (steps // 3, steps - 2, steps - 1):
        norms[6] = math.nan
    return norms


def write_gan(path: Path, *, steps: int = 600, seed: int = 0) -> Record:
    """Write and read back a run of two optimizers that take turns; the norms of the first are forty times larger."""
    generator, names = random.Random(seed), ("generator.0.weight", "generator.2.weight", "critic.0.weight")
    with RecordWriter(path) as writer:
        params = [{"name": name, "shape": [8, 8], "numel": 64, "dtype": "float32", "group": 0} for name in names]
        writer.write(
            "meta", version="0.1.0", schema=1, torch="2.13.0", device="cpu", argv=["gan.py"],
            optimizers=["Adam", "SGD"], params=params,
        )  # fmt: skip
        for i in range(steps):
            mine = (i % 2 == 0, i % 2 == 0, i % 2 == 1)
            scale = 4.0 if i % 2 == 0 else 0.1
            norms = [scale * math.exp(generator.gauss(0, 0.3)) if own else 0.0 for own in mine]
            writer.write("step", i=i, wall=0.01 * i, loss=1.0, lr=0.1, norm=math.hypot(*norms), optimizer=i % 2)
            writer.write("tensors", i=i, norm=norms)
        writer.write("end", steps=steps, wall=0.01 * steps, overhead_ms=0.1 * steps, exit=0, interrupted=False)
    return read_record(path)


def wide_meta(rows: int) -> dict[str, Any]:
    """The first line of a model with many layers, four parameters each."""
    kinds = ("attention.in_proj_weight", "attention.out_proj.weight", "mlp.0.weight", "norm.bias")
    names = [f"transformer.h.{row // 4}.{kinds[row % 4]}" for row in range(rows)]
    params = [{"name": name, "shape": [4], "numel": 4, "dtype": "float32", "group": 0} for name in names]
    return {"t": "meta", "params": params, "optimizers": ["AdamW"], "argv": ["gpt.py"]}
