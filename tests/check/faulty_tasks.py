"""Tasks of recipes, sound and each with one fault. Fields: `x` float32 (8,), `y` int64, `length` int64."""

import os
import random
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Sound:
    """A small classifier."""

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def loss(self, model, fields):
        return functional.cross_entropy(model(fields["x"]), fields["y"])

    def metrics(self, model, fields):
        return {"accuracy": float((model(fields["x"]).argmax(1) == fields["y"]).double().mean())}


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)


class OwnModel(Sound):
    """A task with a `Model` of its own."""

    def build_model(self):
        return self.Model()


class WithDropout(Sound):
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))


class BatchNorm(Sound):
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


class SpectralNorm(Sound):
    """Each forward changes buffers of its own, whatever the samples."""

    def build_model(self):
        model = super().build_model()
        nn.utils.parametrizations.spectral_norm(model[2])
        return model


class PoisonedMean(Sound):
    """Centres by a running mean of its own, which is no buffer: one NaN stays in it."""

    def __init__(self):
        self.mean = torch.zeros(8)

    def loss(self, model, fields):
        with torch.no_grad():
            self.mean = 0.9 * self.mean.to(fields["x"]) + 0.1 * fields["x"].mean(0)
        return functional.cross_entropy(model(fields["x"] - self.mean), fields["y"])


class MaskedTokens(Sound):
    """A mean over valid tokens."""

    def loss(self, model, fields):
        valid = torch.arange(8)[None] < fields["length"][:, None]
        outputs = model(fields["x"])[:, None, :1] * fields["x"][:, :, None]
        return outputs.square()[valid].mean()


class WeighedTokens(MaskedTokens):
    """A mean over valid tokens, which says how many they are."""

    def loss(self, model, fields):
        return super().loss(model, fields), fields["length"].sum()


class TokensWeighedByMethod(MaskedTokens):
    def weight(self, fields):
        return fields["length"].sum()

    def metrics(self, model, fields):
        return {"loss": float(self.loss(model, fields))}


class WronglyWeighedTokens(MaskedTokens):
    """Counts the samples."""

    def loss(self, model, fields):
        return super().loss(model, fields), len(fields["length"])


class MaxNorm(Sound):
    def build_model(self):
        return nn.Sequential(nn.Embedding(13, 8, max_norm=0.5), nn.Flatten(), nn.Linear(8, 3))

    def loss(self, model, fields):
        return functional.cross_entropy(model(fields["length"][:, None]), fields["y"])

    def metrics(self, model, fields):
        return {"loss": float(self.loss(model, fields))}


class DropoutInEvaluation(OwnModel):
    """Functional dropout without `training`."""

    class Model(Layers):
        def forward(self, x):
            return self.last(functional.dropout(torch.tanh(self.first(x)), 0.3))

    def metrics(self, model, fields):
        return {"loss": float(self.loss(model, fields))}


class TrainingModeInMetrics(Sound):
    """Leaves batch norm in training mode in its metrics."""

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 3))

    def metrics(self, model, fields):
        model.train()
        return {"loss": float(self.loss(model, fields))}


class Float32Inside(OwnModel):
    class Model(Layers):
        def forward(self, x):
            hidden = torch.tanh(self.first(x)).float()
            return self.last(hidden.to(x.dtype))


class OwnGenerator(Sound):
    """Draws noise from a generator that no checkpoint has."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def loss(self, model, fields):
        noise = 1 + 0.1 * self.generator.normal()
        return noise * super().loss(model, fields)


class UnseededGenerator(OwnGenerator):
    def __init__(self):
        self.generator = random.Random()

    def loss(self, model, fields):
        return self.generator.uniform(0.5, 1.5) * Sound.loss(self, model, fields)


class StaleState(Sound):
    """Weighs the loss by how many steps there were, counted in an attribute."""

    def __init__(self):
        self.calls = 0

    def loss(self, model, fields):
        if model.training and torch.is_grad_enabled():
            self.calls += 1
        return super().loss(model, fields) / (1 + (self.calls > 2))


class StaleBuffer(OwnModel):
    """A running scale in a buffer that is not saved."""

    class Model(Layers):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(()), persistent=False)

        def forward(self, x):
            outputs = self.last(torch.tanh(self.first(x))) / self.scale
            if self.training and torch.is_grad_enabled():
                self.scale = 1.1 * self.scale
            return outputs


class SummedLoss(Sound):
    def loss(self, model, fields):
        return functional.cross_entropy(model(fields["x"]), fields["y"], reduction="sum")


class RunningBuffer(OwnModel):
    """Divides by a running norm of the samples, from the steps before, in a buffer."""

    class Model(Layers):
        def __init__(self):
            super().__init__()
            self.register_buffer("norm", torch.ones(8))

        def forward(self, x):
            outputs = self.last(torch.tanh(self.first(x / self.norm)))
            if self.training and torch.is_grad_enabled():
                with torch.no_grad():
                    self.norm.mul_(0.9).add_(0.1 * x.square().mean(0).sqrt())
            return outputs


class Contrastive(Sound):
    """Compares the samples of a batch with each other."""

    def loss(self, model, fields):
        outputs = functional.normalize(model(fields["x"]), dim=1)
        return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


class Noise(Sound):
    def loss(self, model, fields):
        return functional.cross_entropy(model(fields["x"] + 0.1 * torch.randn_like(fields["x"])), fields["y"])


class NotDeterministic(Sound):
    """Uses a set's order and the addresses of objects."""

    def loss(self, model, fields):
        return super().loss(model, fields) * (1 + (id(object()) + id(fields)) % 997 / 1e4)


class LogOfNegative(Sound):
    """The model's own NaN, in every batch."""

    class Log(nn.Module):
        def forward(self, x):
            return torch.log(x)

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), self.Log(), nn.Linear(16, 3))


class RootOfZero(Sound):
    """A finite loss whose gradient is not finite."""

    def loss(self, model, fields):
        return super().loss(model, fields) + (0.0 * model(fields["x"])).abs().sqrt().mean()


class NotFiniteParameter(Sound):
    def build_model(self):
        model = super().build_model()
        with torch.no_grad():
            model[2].weight[0, 0] = float("inf")
        return model


class WeighsNothing(Sound):
    def loss(self, model, fields):
        return super().loss(model, fields), 0.0


class NotFiniteInParts(Sound):
    """The loss of fewer samples than a batch of one process is not finite."""

    def loss(self, model, fields):
        return super().loss(model, fields) / (len(fields["y"]) >= 24)


class WithoutGradients(Sound):
    def loss(self, model, fields):
        return 0.0 * super().loss(model, fields) + fields["x"].mean()


class LossInFloat32(Sound):
    """Sound, as a float32 recipe: takes the loss of float32 outputs."""

    def loss(self, model, fields):
        return functional.cross_entropy(model(fields["x"]).float(), fields["y"])


class Float32Constant(OwnModel):
    """Multiplies by a constant that is float32 whatever the model computes in."""

    class Model(Layers):
        def __init__(self):
            super().__init__()
            self.scale = torch.full((16,), 1 / 3, dtype=torch.float32)

        def forward(self, x):
            hidden = (torch.tanh(self.first(x)).to(self.scale) * self.scale).to(x.dtype)
            return self.last(hidden)


def numpys_global(arrays):
    return {**arrays, "x": arrays["x"] + np.random.rand(*arrays["x"].shape).astype(np.float32)}


def pythons_global(arrays):
    return {**arrays, "x": arrays["x"] + np.float32(random.random())}


def torchs_global(arrays):
    return {**arrays, "x": arrays["x"] + torch.rand(8).numpy()}


def without_seed(arrays):
    return {**arrays, "x": arrays["x"] + np.random.default_rng().random(8, dtype=np.float32)}


def system_random(arrays):
    return {**arrays, "x": arrays["x"] + np.float32(os.urandom(1)[0] / 256)}


def by_time(arrays):
    return {**arrays, "x": arrays["x"] + np.float32(time.perf_counter() % 1)}


GENERATOR = np.random.default_rng(0)


def own_seeded(arrays):
    return {**arrays, "x": arrays["x"] + GENERATOR.random(8, dtype=np.float32)}


def by_sample(arrays, context):
    """Sound: random numbers that belong to the samples."""
    noise = [context.generator(row).random(8, dtype=np.float32) for row in range(len(arrays["x"]))]
    return {**arrays, "x": arrays["x"] + np.reshape(noise, arrays["x"].shape).astype(np.float32)}


def by_rank(arrays, context):
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    return {**arrays, "x": arrays["x"] + np.float32(0.1 * rank)}


def noisy_optimizer(parameters, lr):
    return NoisySgd(parameters, lr)


class NoisySgd(torch.optim.SGD):
    """Adds random numbers to the parameters, as Langevin dynamics does."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1e-3 * torch.randn_like(parameter))
