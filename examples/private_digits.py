"""Train a small convolutional network on handwritten digits with differential privacy, to epsilon 3.

The digits come with scikit-learn: 1797 images of 8 by 8 pixels, of which 360 are kept for the test. About ten
seconds on one CPU core; `--epochs 2` takes a few::

    python examples/private_digits.py

Privacy covers the training: which images the network was trained on. The accuracy is measured on test images, which the
network never saw. An accuracy on training images would reveal something about them that epsilon does not cover.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import gradguard.private

TEST_IMAGES = 360


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Return the training images, and images and labels of the test."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).div_(8).sub_(1).unsqueeze(1)
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[train], labels[train]), images[test], labels[test]


def network() -> nn.Module:
    """Build the network, with group norm: in a batch norm each image changes the output of all others."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--delta", type=float, default=1e-4, help="well below 1 / 1437 images")
    parser.add_argument("--batch-size", type=int, default=256, help="large batches: the noise is shared by more images")
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights; noise and batches have none")
    args = parser.parse_args()

    torch.set_num_threads(1)  # the layers are small
    torch.manual_seed(args.seed)
    train, test_images, test_labels = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    private = gradguard.private.make_private(
        model,
        optimizer,
        DataLoader(train, batch_size=args.batch_size, shuffle=True),
        gradguard.private.PrivacyBudget(epsilon=args.epsilon, delta=args.delta, epochs=args.epochs),
    )
    print(f"noise multiplier {private.noise_multiplier:.3f}")

    with tqdm(total=args.epochs * len(private.loader), unit="step") as bar:
        for epoch in range(args.epochs):
            for images, labels in private.loader:
                F.cross_entropy(model(images), labels).backward()
                bar.update(private.step())
            bar.set_postfix(epoch=epoch + 1, accuracy=f"{accuracy(model, test_images, test_labels):.3f}")

    print(f"test accuracy {accuracy(model, test_images, test_labels):.3f}")
    print(f"epsilon {private.epsilon():.3f} at delta {args.delta:g}")


if __name__ == "__main__":
    main()
