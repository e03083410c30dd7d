"""A smoke test of the installed wheel: the calls, the command, the report and its template, the type marker."""

import subprocess
import sys
import warnings
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

import torch

warnings.simplefilter("error")  # not before torch, which warns where NumPy is missing

import gradguard as gg  # noqa: E402

assert "site-packages" in gg.__file__, gg.__file__
assert files("gradguard").joinpath("py.typed").is_file()

is_for_all = "py3-none-any" in distribution("gradguard").read_text("WHEEL")
assert gg.native.status().in_use != is_for_all, gg.native.status()

layer = torch.nn.Linear(2, 1, bias=False)
layer.weight.grad = torch.tensor([[3.0, 4.0]])
assert float(gg.clip_grad_norm_(layer, 1.0)) == 5.0
assert bool(gg.apply_gradient_clipping(layer, "adaptive", 0.01).clipped)

Path("train.py").write_text(
    "import torch\n"
    "model = torch.nn.Linear(2, 1)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "for _ in range(3):\n"
    "    optimizer.zero_grad()\n"
    "    model(torch.ones(4, 2)).square().mean().backward()\n"
    "    optimizer.step()\n",
    encoding="utf-8",
)
command = [str(Path(sys.executable).with_name("gradguard")), "run", "--out", "out", "--clip", "norm=1", "train.py"]
subprocess.run(command, check=True)
assert Path("out/run.html").stat().st_size > 100_000
for words in (["explain", "spike"], ["skill"], ["demo", "--no-open"]):  # pages and records that the wheel brings
    subprocess.run([command[0], *words], check=True, stdout=subprocess.DEVNULL)
print("the wheel works")
