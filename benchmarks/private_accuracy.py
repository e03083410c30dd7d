"""Accuracy against epsilon, as docs/tutorials/private.md trains: prints the table that docs/pictures.py draws.

python benchmarks/private_accuracy.py [--seeds 5]
"""

import argparse
import contextlib
import io
import re
from pathlib import Path

import torch
import torch.nn.functional as F

TUTORIAL = Path(__file__).parents[1] / "docs/tutorials/private.md"
EPSILONS = (0.3, 1.0, 3.0, 10.0)


def without_privacy(images: torch.Tensor, labels: torch.Tensor, rest: torch.Tensor, test: torch.Tensor) -> float:
    """The same model and schedule, without clip and noise."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    for _ in range(15):
        for batch in rest[torch.randperm(len(rest))].split(256):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return (model(images[test]).argmax(1) == labels[test]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    blocks = re.findall(r"^```python\n(.*?)^```", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    tutorial: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec("".join(blocks[:2]), tutorial)
        found = {epsilon: [tutorial["train"](epsilon, seed=seed) for seed in range(seeds)] for epsilon in EPSILONS}
        plain = without_privacy(*(tutorial[name] for name in ("images", "labels", "rest", "test")))
    for epsilon, each in found.items():
        print(f"epsilon {epsilon:g}: {', '.join(f'{accuracy:.3f}' for accuracy in each)}")
    print(f"without privacy: {plain:.3f}")


if __name__ == "__main__":
    main()
