"""``python -m polyscan demo``: a small Hydra learns to read handwritten digits.

The data are scikit-learn's 1,797 digits of 8x8 pixels, a quarter of them held out. The model is in
``demo_model.py``, the picture in ``demo_picture.py``.
"""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

import polyscan

from .demo_model import DigitClassifier
from .demo_picture import save_picture

REQUIRED_ACCURACY = 0.95
BATCH_SIZE = 64
LEARNING_RATE = 4e-3


class Digits(NamedTuple):
    """images (number, 8, 8), dark to bright as 0 to 1, and labels (number,)."""

    images: Tensor
    labels: Tensor


class Epoch(NamedTuple):
    """What is measured after each pass over the training data."""

    loss: float
    accuracy: float


def demo(epochs: int, seed: int, output: Path, backend: str | None = None) -> float:
    """Train, report and save the picture; the held-out accuracy, 0 to 1."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    training, held_out = load_data(seed, device)
    model = DigitClassifier().to(device)

    with nullcontext() if backend is None else polyscan.use_backend(backend):
        print(
            f"data      {len(training.labels)} digits to learn from, {len(held_out.labels)} unseen"
        )
        print(f"model     {sum(p.numel() for p in model.parameters()):,} weights, on {device}")
        explanation = str(model.explain(training.images[:BATCH_SIZE]))
        print(f"backend   {explanation}".replace("\n", "\n          "), flush=True)

        start = time.perf_counter()
        history = train(model, training, held_out, epochs)
        seconds = time.perf_counter() - start
        predicted = predict(model, held_out.images)

    right = int((predicted == held_out.labels).sum())
    accuracy = right / len(held_out.labels)
    picture = save_picture(
        output / "digits.png",
        losses=[epoch.loss for epoch in history],
        accuracies=[epoch.accuracy for epoch in history],
        images=held_out.images.cpu().numpy(),
        labels=held_out.labels.tolist(),
        predicted=predicted.tolist(),
    )
    print(f"accuracy  {accuracy:.1%} of the unseen digits, {right} of {len(held_out.labels)}")
    print(f"training  {seconds:.1f} s")
    print(f"picture   {picture}", flush=True)
    return accuracy


def load_data(seed: int, device: str) -> tuple[Digits, Digits]:
    """What to train on and what to hold out, with equal shares of every digit in both."""
    data = load_digits()
    split = train_test_split(
        data.images, data.target, test_size=0.25, stratify=data.target, random_state=seed
    )
    train_images, test_images, train_labels, test_labels = map(torch.from_numpy, split)

    def digits(images: Tensor, labels: Tensor) -> Digits:
        return Digits(images.float().div(16).to(device), labels.to(device))

    return digits(train_images, train_labels), digits(test_images, test_labels)


def train(model: DigitClassifier, training: Digits, held_out: Digits, epochs: int) -> list[Epoch]:
    """Train with a progress bar; where there is no terminal, with a line per epoch."""
    batches = math.ceil(len(training.labels) / BATCH_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=epochs * batches
    )
    history: list[Epoch] = []
    with progress_bar() as progress:
        task = progress.add_task("training", total=epochs * batches, loss="-", accuracy="-")
        for number in range(1, epochs + 1):
            losses = []
            for loss in train_epoch(model, training, optimizer, schedule):
                losses.append(loss)
                progress.update(task, advance=1, loss=f"{loss:.3f}")
            epoch = Epoch(fmean(losses), accuracy_of(model, held_out))
            history.append(epoch)
            loss_text, accuracy_text = f"{epoch.loss:.3f}", f"{epoch.accuracy:.1%}"
            progress.update(task, loss=loss_text, accuracy=accuracy_text)
            if not progress.console.is_terminal:
                line = f"epoch {number:3} of {epochs}  loss {loss_text}  accuracy {accuracy_text}"
                print(line, flush=True)
    return history


def train_epoch(
    model: DigitClassifier,
    training: Digits,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> Iterator[float]:
    """One pass over the data in random order; yields each batch's loss."""
    order = torch.randperm(len(training.labels)).to(training.labels.device)
    for batch in order.split(BATCH_SIZE):
        loss = F.cross_entropy(model(training.images[batch]), training.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss.item()


@torch.no_grad()
def predict(model: DigitClassifier, images: Tensor) -> Tensor:
    """The digit (number,) that the model sees in each image."""
    scores: Tensor = model(images)
    return scores.argmax(dim=1)


def accuracy_of(model: DigitClassifier, digits: Digits) -> float:
    return (predict(model, digits.images) == digits.labels).double().mean().item()


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("accuracy {task.fields[accuracy]}"),
        TimeElapsedColumn(),
    )
