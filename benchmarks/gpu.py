"""Clips on a GPU against PyTorch's and an apex-style one, and a step with per-sample clipping over the plain step.

python benchmarks/gpu.py                 # on the first GPU; writes benchmarks/gpu/<device>.md
python benchmarks/gpu.py --device cpu    # only to see that it runs: no launches, no file
python benchmarks/gpu.py --only per_sample --quick    # a minute: per-sample clipping with and without tensor cores, and
                                                      # the kernels and functions that take most of a step; no file

Clips: launches, device time, host time, and what share of the device time reading the gradients once would take.
Samples: a step is forward, backward, clip and SGD's step; Opacus too where it is installed. `make gpu` calls this after
the tests.
"""

import argparse
import cProfile
import gc
import importlib.util
import io
import itertools
import pstats
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import gradguard as gg
import per_sample
from gradguard.per_sample import contributions
from gradguard.per_sample.layers import convolution
from shapes import gpt2_small, many_small, resnet50

MODELS = {"GPT-2 small": gpt2_small, "ResNet-50": resnet50, "2,000 x 1,000": many_small}
Call = Callable[[int], object]


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.empty(shape, dtype=dtype, device=device).normal_(std=0.05)) for shape in shapes]
    for p in made:
        p.grad = torch.empty_like(p).normal_()
    return made


@torch.no_grad()
def apex_style(params: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """One multi-tensor norm, the norm of norms, one multi-tensor product, always; no wait."""
    grads = [p.grad for p in params]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(grads[0].dtype))
    return norm


def rows(a: list[nn.Parameter]) -> dict[str, dict[str, Call]]:
    """Each is called again and again on the same gradients: a threshold that falls goes on binding."""
    norm = float(gg.get_total_norm([p.grad for p in a]))
    thresholds = {"does not bind": lambda k: 1e9, "binds": lambda k: norm * 0.99 ** (k + 1)}
    found: dict[str, dict[str, Call]] = {}
    for name, limit in thresholds.items():
        found[f"norm, {name}"] = {
            "gradguard": lambda k, limit=limit: gg.clip_grad_norm_(a, limit(k)),
            "torch": lambda k, limit=limit: nn.utils.clip_grad_norm_(a, limit(k)),
            "apex-style": lambda k, limit=limit: apex_style(a, limit(k)),
        }
        bound = (lambda k: 1e3) if name == "does not bind" else (lambda k: 2 * 0.99**k)
        found[f"value, {name}"] = {
            "gradguard": lambda k, bound=bound: gg.clip_grad_value_(a, bound(k)),
            "torch": lambda k, bound=bound: nn.utils.clip_grad_value_(a, bound(k)),
        }
    found["AGC, binds"] = {"gradguard": lambda k: gg.clip_grad_adaptive_(a, 0.01 * 0.99**k)}
    return found


def guard_rows(shapes: list[tuple[int, ...]], device: str) -> dict[str, Call]:
    """A guarded step of fused AdamW, and torch's clip before the same step."""
    ours, theirs = (parameters(shapes, torch.float32, device) for _ in range(2))
    a, b = (torch.optim.AdamW(params, lr=1e-6, fused=True) for params in (ours, theirs))
    gg.Guard(a, gg.ClipByGlobalNorm(1.0))

    def by_hand(k: int) -> None:
        nn.utils.clip_grad_norm_(theirs, 1.0)
        b.step()

    return {"gradguard": lambda k: a.step(), "torch": by_hand}


def device_ms(call: Call, device: str, repetitions: int = 20) -> float:
    times = []
    for k in range(3, repetitions + 3):
        if device == "cpu":
            start = time.perf_counter()
            call(k)
            times.append(1e3 * (time.perf_counter() - start))
            continue
        first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call(k)
        second.record()
        second.synchronize()
        times.append(first.elapsed_time(second))
    return statistics.median(times)


def host_us(call: Call, device: str, repetitions: int = 20) -> float:
    """How long the host is busy, the device having nothing else to do."""
    times = []
    for k in range(30, repetitions + 30):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call(k)
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def launches(call: Call, device: str) -> int:
    if device == "cpu":
        return 0
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        call(60)
        torch.cuda.synchronize()
    return sum(e.count for e in seen.key_averages() if "LaunchKernel" in e.key)


def copy_bandwidth(device: str, size: int = 1 << 26) -> float:
    """Bytes read and written in a second by a copy of one block."""
    one, two = torch.empty(size, device=device), torch.empty(size, device=device)
    milliseconds = device_ms(lambda k: two.copy_(one), device)
    return 2 * one.numel() * one.element_size() / (1e-3 * milliseconds)


def clip_lines(device: str, only: str) -> list[str]:
    bandwidth = copy_bandwidth(device)
    lines = [
        f"A copy of one block: {bandwidth / 1e9:.0f} GB/s. Share: what reading all gradients once takes at that rate, "
        "of the device time.",
        "",
        "| gradients | dtype | call | | launches | device ms | host us | share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, shapes in MODELS.items():
        if only not in model:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            a = parameters(shapes(), dtype, device)
            size = sum(p.grad.numel() * p.grad.element_size() for p in a)
            table = rows(a)
            if dtype is torch.float32:
                table["guarded fused AdamW"] = guard_rows(shapes(), device)
            for call, ways in table.items():
                for who, way in ways.items():
                    for k in range(3):
                        way(k)
                    took = device_ms(way, device)
                    cells = f"{launches(way, device)} | {took:.3f} | {host_us(way, device):.0f}"
                    share = size / bandwidth * 1e3 / took
                    lines.append(f"| {model} | {str(dtype)[6:]} | {call} | {who} | {cells} | {share:.2f} |")
                    print(lines[-1], flush=True)
    return lines


SAMPLES = {
    "MLP": per_sample.Problem(per_sample.mlp, (512, 784)),
    "CNN": per_sample.Problem(per_sample.cnn, (512, 3, 32, 32)),
    "GPT 124M": per_sample.Problem(lambda: per_sample.Gpt(512, 768, 12, 50_257), (16, 512), 50_257),
}
AT_LEAST = 5
"""Steps that are timed of each way."""


def peak(step: Call, device: str) -> float:
    """Megabytes that are allocated in a step at most, beside what was there."""
    if device == "cpu":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(0)
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def sample_lines(device: str, only: str) -> list[str]:
    lines = [
        "| model | autocast | step | ms | times the plain one | MB | times the plain one |",
        "|---|---|---|---|---|---|---|",
    ]
    ways = {"plain": per_sample.plain, "gradguard": per_sample.clipped}
    if importlib.util.find_spec("opacus") is not None:
        ways |= {"Opacus ghost": per_sample.opacus_ghost, "Opacus hooks": per_sample.opacus_hooks}
    for name, problem in SAMPLES.items():
        if only not in name:
            continue
        for half in (False, True):
            for who, way in ways.items():
                try:
                    with torch.device(device):  # not while steps are timed: the mode makes each look at a tensor slow
                        step = way(problem)
                    with torch.autocast(device, torch.bfloat16, enabled=half):
                        for _ in range(3):
                            step()
                        took = device_ms(lambda k, step=step: step(), device, AT_LEAST)
                        megabytes = peak(lambda k, step=step: step(), device)
                    del step
                except Exception as error:  # of a peer, such as for want of memory
                    if who in ("plain", "gradguard"):
                        raise
                    took = megabytes = float("nan")
                    print(f"{who} on {name}: {type(error).__name__}: {error}")
                gc.collect()
                if device != "cpu":
                    torch.cuda.empty_cache()
                if who == "plain":
                    first, least = took, megabytes or 1.0
                cells = f"{took:.2f} | {took / first:.2f} | {megabytes:.0f} | {megabytes / least:.2f}"
                lines.append(f"| {name} | {'bfloat16' if half else 'no'} | {who} | {cells} |")
                print(lines[-1], flush=True)
    return lines


# Quick: one way of ours against the other, and where the time goes


@contextmanager
def without_tensor_cores() -> Iterator[None]:
    """Multiply 16-bit operands in float32, and give each sample's channels to a convolution as a group."""
    with (
        mock.patch.object(contributions, "_has_tensor_cores", return_value=False),
        mock.patch.object(convolution, "_unfolds", return_value=False),
    ):
        yield


@contextmanager
def as_it_is() -> Iterator[None]:
    yield


def quick_lines(device: str, only: str) -> list[str]:
    """A row for each way: the median of some steps, when the host was done, launches, and memory."""
    ways = {
        "plain": (per_sample.plain, as_it_is),
        "gradguard, float32 products": (per_sample.clipped, without_tensor_cores),
        "gradguard": (per_sample.clipped, as_it_is),
    }
    if importlib.util.find_spec("opacus") is not None:
        ways["Opacus ghost"] = per_sample.opacus_ghost, as_it_is
    lines = [
        "| model | autocast | step | ms | times plain | host ms | launches | MB | first step s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name, problem in (SAMPLES if device != "cpu" else {"tiny GPT": per_sample.TINY}).items():
        if only not in name:
            continue
        plain_ms = 1.0
        for half in (False, True):
            for who, (way, how) in ways.items():
                try:
                    with how():
                        cells, took = quick_row(device, way, problem, half)
                except Exception as error:  # of a peer, such as for want of memory
                    cells, took = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}", float("nan")
                plain_ms = took if who == "plain" else plain_ms
                cells = cells.replace("TIMES", f"{took / plain_ms:.2f}")
                lines.append(f"| {name} | {'bfloat16' if half else 'no'} | {who} | {cells} |")
                print(lines[-1], flush=True)
                gc.collect()
                if device != "cpu":
                    torch.cuda.empty_cache()
    return lines


def quick_row(device: str, way: Callable, problem: per_sample.Problem, half: bool) -> tuple[str, float]:
    with torch.device(device):
        step = way(problem)
    with torch.autocast(device, torch.bfloat16, enabled=half):
        start = time.perf_counter()
        step()
        waited(device)
        first = time.perf_counter() - start
        for _ in range(2):  # so that what is counted is a step without a witness: 14 and 15 steps in
            step()
        waited(device)
        call = lambda k: step()  # noqa: E731
        took, host = device_ms(call, device, 5), host_us(call, device, 5) / 1e3
        counted, megabytes = launches(call, device), peak(call, device)
        return f"{took:.2f} | TIMES | {host:.2f} | {counted} | {megabytes:.0f} | {first:.2f}", took


def waited(device: str) -> float:
    """Wait for the device, and return the time."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def phase_lines(device: str, problem: per_sample.Problem, half: bool, steps: int = 5) -> list[str]:
    """The milliseconds of each part of a clipped step, the device being waited for after each."""
    with torch.device(device):
        model, inputs, targets = problem.build()
    optimizer = per_sample.sgd(model)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    found = []
    for _ in range(steps + 3):
        optimizer.zero_grad()
        times = [waited(device)]
        with torch.autocast(device, torch.bfloat16, enabled=half):
            loss = per_sample.loss_of(model(inputs), targets)
        times.append(waited(device))
        loss.backward()
        times.append(waited(device))
        clipper.clip_and_accumulate()
        times.append(waited(device))
        clipper.pre_step()
        optimizer.step()
        times.append(waited(device))
        found.append([1e3 * (b - a) for a, b in itertools.pairwise(times)])
    middle = [statistics.median(column) for column in zip(*found[3:], strict=True)]
    names = ("forward", "backward", "clip_and_accumulate", "pre_step and step")
    return ["; ".join(f"{name} {ms:.1f} ms" for name, ms in zip(names, middle, strict=True))]


def profile_lines(device: str, problem: per_sample.Problem, half: bool) -> list[str]:
    """The kernels, operations and Python functions that take most of a clipped step."""
    from torch.profiler import ProfilerActivity, profile

    with torch.device(device):
        step = per_sample.clipped(problem)
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device != "cpu" else [])
    with torch.autocast(device, torch.bfloat16, enabled=half), torch.autograd.set_multithreading_enabled(False):
        for _ in range(4):  # the next have no witness
            step()
        waited(device)
        with profile(activities=kinds) as seen:
            step()
            waited(device)
        functions = cProfile.Profile()
        functions.enable()
        for _ in range(2):
            step()
        waited(device)
        functions.disable()
    events, lines = seen.key_averages(), []
    if device != "cpu":
        kernels = [e for e in events if str(e.device_type).endswith("CUDA")]
        kernels.sort(key=lambda e: -e.self_device_time_total)
        whole = sum(e.self_device_time_total for e in kernels)
        lines.append(f"kernels: {whole / 1e3:.2f} ms in one step")
        lines += [f"  {e.self_device_time_total / 1e3:8.2f} ms {e.count:5d} x {e.key[:110]}" for e in kernels[:14]]
        by_operation = [e for e in events if str(e.device_type).endswith("CPU")]
        by_operation.sort(key=lambda e: -e.self_device_time_total)
        lines.append("operations, by the device time of their kernels")
        lines += [f"  {e.self_device_time_total / 1e3:8.2f} ms {e.count:5d} x {e.key[:60]}" for e in by_operation[:10]]
    on_host = sorted(events, key=lambda e: -e.self_cpu_time_total)
    lines.append("operations, by the time of the host")
    lines += [f"  {e.self_cpu_time_total / 1e3:8.2f} ms {e.count:5d} x {e.key[:60]}" for e in on_host[:10]]
    text = io.StringIO()
    pstats.Stats(functions, stream=text).sort_stats("tottime").print_stats(14)
    table = text.getvalue().splitlines()
    start = next(i for i, line in enumerate(table) if "ncalls" in line)
    lines += ["functions of Python, in two steps", *[line[:130] for line in table[start:] if line.strip()]]
    return lines


def quick(device: str, only: str) -> None:
    start = time.perf_counter()
    warnings.filterwarnings("ignore")  # of Opacus
    quick_lines(device, only)
    for name, problem in (SAMPLES if device != "cpu" else {"tiny GPT": per_sample.TINY}).items():
        if only in name:
            print(f"\n{name}, bfloat16:", *phase_lines(device, problem, True), flush=True)
    problem = SAMPLES["GPT 124M"] if device != "cpu" else per_sample.TINY
    print("\nGPT, bfloat16", *profile_lines(device, problem, True), sep="\n", flush=True)
    print(f"\n{time.perf_counter() - start:.0f} s in all")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="", help="models whose name contains this")
    parser.add_argument("--only", choices=["per_sample", "clips"], help="one of the two tables; no file")
    parser.add_argument("--quick", action="store_true", help="with --only per_sample: a minute, and a profile")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU: nothing was measured (--device cpu only shows that this runs)")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    if args.only is not None:
        print(f"{name}, torch {torch.__version__}")
        table = clip_lines if args.only == "clips" else quick if args.quick else sample_lines
        table(args.device, args.model)
        return
    lines = [
        f"# {name}, torch {torch.__version__}",
        "",
        "## Per-sample clipping",
        "",
        *sample_lines(args.device, args.model),
        "",
        "## Clips",
        "",
        *clip_lines(args.device, args.model),
    ]
    if args.device == "cuda":
        folder = Path(__file__).parent / "gpu"
        folder.mkdir(exist_ok=True)
        file = folder / f"{name.replace(' ', '_')}.md"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"written: {file}")


if __name__ == "__main__":
    main()
