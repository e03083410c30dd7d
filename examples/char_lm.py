"""Train a character-level recurrent language model on the sources of Python's standard library.

Every machine with Python has the text. It takes about a minute on two CPU cores; `--steps 20` takes a few seconds::

    python examples/char_lm.py

The model is an embedding, a plain recurrent network of rectified linear units and a linear layer. Its recurrent
weights start at the identity (Le, Jaitly and Hinton, 2015), so that it remembers for long; the price is that its
gradients can explode. It reads the text in chunks and carries its hidden state from one chunk to the next
(truncated backpropagation through time).
"""

import argparse
import math
import string
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

ALPHABET = "\n" + string.printable[:95] + "\t"  # the tab stands for all other characters too
TRAIN_CHARACTERS, VALIDATION_CHARACTERS = 1_500_000, 64_000


class CharModel(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), hidden)
        self.rnn = nn.RNN(hidden, hidden, nonlinearity="relu", batch_first=True)
        nn.init.eye_(self.rnn.weight_hh_l0)
        self.head = nn.Linear(hidden, len(ALPHABET))

    def forward(self, characters: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        features, state = self.rnn(self.embedding(characters), state)
        return self.head(features), state


def load_text(length: int) -> Tensor:
    """Return the first `length` characters of the standard library's modules, as indices into ALPHABET."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    index = {character: i for i, character in enumerate(ALPHABET)}
    return torch.tensor([index.get(character, index["\t"]) for character in text[:length]])


def in_chunks(text: Tensor, batch: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """Cut the text into `batch` parallel streams, and these into (input, target) chunks of `length`."""
    streams = text[: len(text) // batch * batch].view(batch, -1)
    starts = range(0, streams.shape[1] - length, length)
    return [(streams[:, i : i + length], streams[:, i + 1 : i + length + 1]) for i in starts]


@torch.no_grad()
def evaluate(model: CharModel, chunks: list[tuple[Tensor, Tensor]]) -> float:
    state, total = None, 0.0
    for characters, targets in chunks:
        logits, state = model(characters, state)
        total += F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    return total / len(chunks)


@torch.no_grad()
def sample(model: CharModel, prompt: str, length: int) -> str:
    characters, state, text = torch.tensor([[ALPHABET.index(c) for c in prompt]]), None, prompt
    for _ in range(length):
        logits, state = model(characters, state)
        characters = torch.multinomial(F.softmax(logits[:, -1] / 0.7, dim=-1), 1)
        text += ALPHABET[characters.item()]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--lr", type=float, default=0.004)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=100, help="characters per chunk")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    text = load_text(TRAIN_CHARACTERS + VALIDATION_CHARACTERS)
    chunks = in_chunks(text[:TRAIN_CHARACTERS], args.batch, args.length)
    held_out = in_chunks(text[TRAIN_CHARACTERS:], args.batch, args.length)
    model = CharModel(args.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=200)

    loss_column = TextColumn("loss {task.fields[loss]:.3f}")
    with Progress("step", MofNCompleteColumn(), BarColumn(), loss_column, TimeElapsedColumn()) as progress:
        task, state = progress.add_task("training", total=args.steps, loss=float("nan")), None
        for step in range(args.steps):
            position = step % len(chunks)
            state = state.detach() if position > 0 else None
            characters, targets = chunks[position]
            logits, state = model(characters, state)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            warm_up.step()
            progress.update(task, advance=1, loss=loss.item())

    validation_loss = evaluate(model, held_out)
    print(f"validation loss: {validation_loss:.3f} nats per character")
    if math.isfinite(validation_loss):
        print(sample(model, "def ", 200))


if __name__ == "__main__":
    main()
