"""Clips on a GPU against PyTorch's and an apex-style one, and a step with per-sample clipping over the plain step.

python benchmarks/gpu.py                 # on the first GPU; writes benchmarks/gpu/<device>.md
python benchmarks/gpu.py --device cpu    # only to see that it runs: no launches, no file

Clips: launches, device time, host time, and what share of the device time reading the gradients once would take.
Samples: a step is forward, backward, clip and SGD's step; Opacus too where it is installed. `make gpu` calls this after
the tests.
"""

import argparse
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import gradguard as gg
import per_sample
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="", help="models whose name contains this")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU: nothing was measured (--device cpu only shows that this runs)")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
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
