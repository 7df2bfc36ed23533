"""Loops whose fault is in what they keep from step to step: learning rates, state outside checkpoints, buffers."""

import torch
from torch import nn
from torch.nn import functional

from tests.check.loops import data, entropy, loader_of, looped, parts, sgd, step_of


def learning_rate(session):
    """Each rank's scheduler sees its own loss."""
    model, updater, loader = parts(session)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(updater.optimizer, patience=0, factor=0.5)
    step = step_of(
        updater,
        lambda batch: entropy(model, *batch),
        after_update=lambda loss: schedule.step(float(loss)),
    )
    return loader, step


def patient_plateau(session):
    """Each rank's scheduler sees its own loss, and will not act on it before the check has ended."""
    made = []

    def after_step(model, updater, loss):
        if not made:
            made.append(torch.optim.lr_scheduler.ReduceLROnPlateau(updater.optimizer, patience=10))
        made[0].step(float(loss))

    return looped(session, entropy, after_step=after_step)[:2]


def rate_by_ranks(session):
    """A learning rate that grows with the number of ranks."""
    model, updater, loader = parts(session)
    for group in updater.optimizer.param_groups:
        group["lr"] = 0.05 * session.world_size
    return loader, step_of(updater, lambda batch: entropy(model, *batch))


def scheduled(session):
    made = []
    loader, step, updater = looped(session, entropy, after_step=lambda *_: made[0].step())
    made.append(torch.optim.lr_scheduler.CosineAnnealingLR(updater.optimizer, 6))
    return loader, step, None, {"scheduler": made[0]}


def unsaved_scheduler(session):
    return scheduled(session)[:2]


def kept_gradients(session):
    """Weighs each step by the losses of the steps before, in a list that no checkpoint has."""
    model, updater, loader = parts(session)
    kept = []

    def step(batch):
        updater.zero_grad()
        loss = entropy(model, *batch)
        (loss * (1 + sum(kept))).backward()
        kept.append(float(loss.detach()))
        updater.step()
        return loss

    return loader, step


def saved_second_model(session):
    """Sound: a teacher that follows the model."""
    torch.manual_seed(0)
    model, teacher = nn.Linear(8, 3), nn.Linear(8, 3).requires_grad_(False)

    def loss_of(model, x, y):
        return entropy(model, x, y) + functional.mse_loss(model(x), teacher(x))

    def after_step(model, updater, loss):
        with torch.no_grad():
            teacher.weight.lerp_(model.weight, 0.2)

    loader, step, _ = looped(session, loss_of, model=model, after_step=after_step)
    return loader, step, None, {"teacher": teacher}


def second_model(session):
    """The same, not saved."""
    return saved_second_model(session)[:2]


STEPS = 0


def counts_globally(session):
    """Counts its steps in a variable of the script."""

    def loss_of(model, x, y):
        global STEPS
        STEPS += 1
        return entropy(model, x, y) / (1 + STEPS // 4)

    return looped(session, loss_of)[:2]


def evaluates_in_training_mode(session):
    """Evaluates without model.eval()."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    updater = sgd(session, model)

    def evaluate():
        with torch.no_grad():
            x, y = data()[:16]
            return {"loss": float(entropy(model, x.to(next(model.parameters()).dtype), y))}

    return loader_of(session), step_of(updater, lambda batch: entropy(model, *batch)), evaluate


class Centred(nn.Module):
    """Subtracts a mean of the rank's own samples, in a buffer that it replaces."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 3)
        self.register_buffer("center", torch.zeros(3))

    def forward(self, x):
        outputs = self.body(x)
        centred = outputs - self.center
        if self.training and torch.is_grad_enabled():
            self.center = 0.9 * self.center + 0.1 * outputs.detach().mean(0)
        return centred


def center_of_each_rank(session):
    torch.manual_seed(0)
    return looped(session, entropy, model=Centred())[:2]


CAUSES = {
    learning_rate: "LEARNING_RATE",
    patient_plateau: "LEARNING_RATE",
    rate_by_ranks: "LEARNING_RATE",
    scheduled: None,
    unsaved_scheduler: "OWN_STATE",
    kept_gradients: "OWN_STATE",
    saved_second_model: None,
    second_model: "OWN_STATE",
    counts_globally: "OWN_STATE",
    evaluates_in_training_mode: "EVALUATION",
    center_of_each_rank: "BUFFER",
}
