"""Train on handwritten digits of which 30 % have a wrong label: plain, with batch clipping, with per-sample clipping.

The digits come with scikit-learn: 1797 images of 8 by 8 pixels, of which 360, with right labels, are kept for the test.
A network that is trained for long memorises the wrong labels. A sample that contradicts the others has a large
gradient. A clip of each sample reduces it to the size of the others; a clip of the batch cannot. It takes about ten
seconds on one CPU core; `--epochs 2` takes one::

    python examples/noisy_labels.py
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import plotly.graph_objects as go
import torch
import torch.nn.functional as F
from plotly.subplots import make_subplots
from sklearn.datasets import load_digits
from torch import Tensor, nn

import gradguard as gg

TEST_IMAGES, BATCH, MAX_NORM, NORMS_AFTER = 360, 64, 1.0, 10


class Digits(NamedTuple):
    """Return training images and labels, which of these labels are wrong, and images and labels of the test."""

    images: Tensor
    labels: Tensor
    wrong: Tensor
    test_images: Tensor
    test_labels: Tensor


class Arm(NamedTuple):
    """One way to train."""

    clip: str
    learning_rate: float
    colour: str


ARMS = {
    "plain": Arm("none", 0.1, "#D55E00"),
    "plain, learning rate 0.01": Arm("none", 0.01, "#E69F00"),
    "batch clip": Arm("batch", 0.1, "#777777"),
    "per-sample clip": Arm("sample", 0.1, "#0072B2"),
}


def digits(wrong_labels: float, seed: int) -> Digits:
    generator = torch.Generator().manual_seed(seed)
    bunch = load_digits()
    images, labels = torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=generator)
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    shown, wrong = labels[train].clone(), torch.zeros(len(train), dtype=torch.bool)
    wrong[torch.randperm(len(train), generator=generator)[: int(wrong_labels * len(train))]] = True
    shift = torch.randint(1, 10, (int(wrong.sum()),), generator=generator)
    shown[wrong] = (shown[wrong] + shift) % 10
    return Digits(images[train], shown, wrong, images[test], labels[test])


def train(data: Digits, arm: Arm, epochs: int, seed: int) -> tuple[list[float], Tensor]:
    """Return the test accuracy after each epoch, and the norms of training samples' gradients after the tenth."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=arm.learning_rate, momentum=0.9)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(MAX_NORM)) if arm.clip == "sample" else None
    accuracies, norms = [], torch.empty(0)
    for epoch in range(epochs):
        for indices in torch.randperm(len(data.labels)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(data.images[indices]), data.labels[indices]).backward()
            if clipper is not None:
                clipper.clip_and_accumulate()
                clipper.pre_step()
            elif arm.clip == "batch":
                gg.clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
        with torch.no_grad():
            right = model(data.test_images).argmax(1) == data.test_labels
        accuracies.append(float(right.float().mean()))
        if clipper is not None and epoch + 1 == min(NORMS_AFTER, epochs):
            norms = all_norms(model, clipper, data)
    return accuracies, norms


def all_norms(model: nn.Module, clipper: gg.PerSampleGradientClipper, data: Digits) -> Tensor:
    """Return the norm of each training sample's gradient; nothing is trained."""
    F.cross_entropy(model(data.images), data.labels).backward()
    clipper.clip_and_accumulate()
    clipper.take()  # the clipped gradients are not used
    assert clipper.statistics is not None
    return clipper.statistics.norms


def figure_of(accuracies: dict[str, list[float]], norms: Tensor, wrong: Tensor) -> go.Figure:
    after = min(NORMS_AFTER, len(accuracies["plain"]))
    titles = ("Accuracy on test images", f"Norms of the training samples' gradients, epoch {after}")
    figure = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.1)
    for name, values in accuracies.items():
        width = 5 if name == "per-sample clip" else 2.5
        figure.add_scatter(
            x=list(range(1, len(values) + 1)), y=values, name=f"{name}: {values[-1]:.1%} at the end", mode="lines",
            line={"color": ARMS[name].colour, "width": width}, row=1, col=1,
        )  # fmt: skip
    parts = {"right label": (~wrong, "#009E73", 0.2), "wrong label": (wrong, "#CC79A7", 0.85)}
    for name, (chosen, colour, place) in parts.items():
        figure.add_histogram(
            x=norms[chosen].tolist(), name=name, marker={"color": colour}, opacity=0.65, showlegend=False,
            xbins={"start": 0, "size": 0.25}, row=1, col=2,
        )  # fmt: skip
        figure.add_annotation(
            text=f"{name}: {int(chosen.sum())}", x=place, y=0.45, xref="x2 domain", yref="y2 domain", showarrow=False,
            font={"color": colour, "size": 14},
        )  # fmt: skip
    figure.add_vline(
        x=MAX_NORM, line={"dash": "dash", "color": "#222222"}, row=1, col=2,
        annotation={"text": f"everything to the right is scaled to {MAX_NORM:g}", "xanchor": "left", "xshift": 4},
    )  # fmt: skip
    figure.update_xaxes(title_text="epoch", row=1, col=1)
    figure.update_yaxes(tickformat=".0%", range=[0.7, 1.0], row=1, col=1)
    figure.update_xaxes(title_text="norm", row=1, col=2)
    figure.update_yaxes(title_text="samples", row=1, col=2)
    figure.update_layout(
        template="plotly_white", height=450, barmode="overlay", margin={"l": 60, "r": 30, "t": 50, "b": 50},
        legend={"orientation": "h", "x": 0, "y": -0.16},
    )  # fmt: skip
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--wrong", type=float, default=0.3, help="fraction of labels that are wrong")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/noisy_labels.html"))
    args = parser.parse_args()

    torch.set_num_threads(1)  # the matrices are small
    data = digits(args.wrong, args.seed)
    print(f"{'run':28}accuracy at the end   at the best epoch")
    accuracies, norms = {}, torch.empty(0)
    for name, arm in ARMS.items():
        accuracies[name], found = train(data, arm, args.epochs, args.seed)
        norms = found if len(found) else norms
        print(f"{name:28}{accuracies[name][-1]:19.3f}{max(accuracies[name]):20.3f}", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure_of(accuracies, norms, data.wrong).write_html(args.out, config={"displayModeBar": False})
    print(f"figure: {args.out}")


if __name__ == "__main__":
    main()
