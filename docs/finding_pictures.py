"""Draw the pictures of docs/findings.md: small real runs, sick and healthy, as the report shows them.

    python docs/finding_pictures.py

Each run is trained, recorded and put into a report; what is saved is the report's own drawing, in Chromium.
"""

import io
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradguard as gg
from gradguard.monitoring.record.file import Record, read_record
from gradguard.monitoring.show.report import write_report

FOLDER = Path(__file__).parent / "findings"
TEACHER = torch.randn(8, 4, generator=torch.Generator().manual_seed(99))


def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch that is never seen again: a linear rule, with noise on what it says."""
    x = torch.randn(32, 8)
    return x, x @ TEACHER + 0.3 * torch.randn(32, 4)


def scaled(when: Callable[[int], bool], times: float) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of which some have inputs that are far too large."""
    return lambda i: ((x := batch(i))[0] * (times if when(i) else 1.0), x[1])


def at(step: int, act: Callable[..., Any]) -> Callable[..., Any]:
    """Return what acts on one step only."""
    return lambda i, *rest: act(*rest) if i == step else None


def since(step: int, act: Callable[..., Any]) -> Callable[..., Any]:
    """Return what acts on a step and on all after it."""
    return lambda i, *rest: act(*rest) if i >= step else None


def set_rate(rate: float) -> Callable[..., Any]:
    """Return what sets the learning rate."""
    return lambda model, optimizer: optimizer.param_groups[0].update(lr=rate)


def kill_units(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Push the biases of a layer so low that its ReLU never lets anything through again."""
    with torch.no_grad():
        model[2].bias.fill_(-100.0)


def saturate(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Push the outputs to where tanh is flat."""
    with torch.no_grad():
        model[4].bias.fill_(30.0)


def detach(model: nn.Sequential) -> None:
    """Drop the gradient of one layer, as ``detach()`` in a forward pass does."""
    model[0].weight.grad = model[0].bias.grad = None


def net(last: nn.Module | None = None) -> nn.Sequential:
    """Return a small network."""
    layers = [nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]
    return nn.Sequential(*layers, *([] if last is None else [last]))


def train(
    path: Path,
    *,
    model: Callable[[], nn.Sequential] = net,
    optimizer: Callable[..., torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=3e-3),
    data: Callable[[], Any] = lambda: batch,
    clip: Callable[[], Any] = lambda: None,
    steps: int = 300,
    seed: int = 7,
    before: Callable[..., Any] = lambda *_: None,
    after_backward: Callable[..., Any] = lambda *_: None,
) -> Record:
    """Train as a script would, watched; ``before`` a step and ``after_backward`` are where it goes wrong."""
    torch.manual_seed(seed)
    network, batches, clipper = model(), data(), clip()
    stepper = optimizer(network.parameters())
    with gg.Monitor(stepper, sink=str(path), model=network, every=1) as monitor:
        for i in range(steps):
            before(i, network, stepper)
            x, y = batches(i)
            stepper.zero_grad()
            loss = (network(x) - y).square().mean()
            loss.backward()
            after_backward(i, network)
            if clipper is not None:
                clipper(network)
            stepper.step()
            monitor.log(loss=loss)
    return read_record(path)


def at_norm(threshold: float) -> dict[str, Any]:
    """Return the arguments for a clip at a fixed norm."""
    return {"clip": lambda: gg.ClipByGlobalNorm(threshold)}


def sgd(lr: float, **more: Any) -> dict[str, Any]:
    """Return the arguments for SGD."""
    return {"optimizer": lambda p: torch.optim.SGD(p, lr=lr, **more)}


ONE_LAYER = {"model": lambda: nn.Sequential(nn.Linear(8, 4))}
SLOW = sgd(1e-3)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {  # what is drawn, the sick run, the healthy one
    "nonfinite": ("overlay", {"data": lambda: scaled(lambda i: i == 200, float("inf"))}, {"seed": 8}),
    "exploding": ("overlay", ONE_LAYER | sgd(0.02) | {"before": at(150, set_rate(5.0)), "steps": 200},
                  ONE_LAYER | sgd(0.02) | {"steps": 200}),
    "diverging_loss": ("overlay", {"before": at(150, set_rate(1.0))}, {}),
    "spike": ("overlay", {"data": lambda: scaled(lambda i: i == 200, 5)}, {}),
    "recurring_spikes": ("overlay", SLOW | {"data": lambda: scaled(lambda i: i % 25 == 24, 20)}, SLOW),
    "vanishing": ("overlay", {"model": lambda: net(nn.Tanh()), "before": at(200, saturate)},
                  {"model": lambda: net(nn.Tanh())}),
    "dead_layer": ("layers", {"before": at(150, kill_units)}, {}),
    "detached_layer": ("layers", {"after_backward": since(150, detach)}, None),
    "clipping_always_on": ("norms", sgd(0.02) | at_norm(0.05), sgd(0.02) | {"clip": gg.ClipByMedian}),
}  # fmt: skip


def picture(page: Any, report: Path, drawn: str, path: Path) -> None:
    """Save a drawing of a report."""
    from PIL import Image

    page.goto(report.as_uri())
    section = page.locator(f"section[aria-labelledby$='{drawn}'] figure").first
    section.wait_for()
    page.add_style_tag(content="button { visibility: hidden }")  # those below the drawing
    page.wait_for_timeout(500)
    Image.open(io.BytesIO(section.screenshot())).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


def main() -> None:
    """Draw all, or those that are named."""
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 760, "height": 900})
        for name in sys.argv[1:] or CASES:
            drawn, sick, healthy = CASES[name]
            cases = {"sick": sick} if healthy is None else {"sick": sick, "healthy": healthy}
            runs = {label: train(Path(folder, name, label, "run.jsonl"), **how) for label, how in cases.items()}
            if drawn == "overlay":
                report = write_report([*runs.values()], Path(folder, name, "report.html"))
                picture(page, report, drawn, FOLDER / f"{name}.png")
                continue
            for label, run in runs.items():
                report = write_report([run], Path(folder, name, f"{label}.html"))
                picture(page, report, drawn, FOLDER / f"{name}_{label}.png")
        browser.close()


if __name__ == "__main__":
    main()
