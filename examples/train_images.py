"""Train a small diffusion U-Net on images of shapes twice: with Flax's GroupNorm and silu, and with jaxnorm's of both.

    python examples/train_images.py                   # discs, squares and triangles, drawn on the spot
    python examples/train_images.py --steps 2000 --size 64 --channels 64 --dtype bfloat16

The model learns the velocity that leads from noise to an image (flow matching, https://arxiv.org/abs/2210.02747). It is
trained from one seed on the same batches with either norm. The loss curves should lie on each other; they are compared
and plotted, with images that the model draws which was trained with jaxnorm.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from common import Trainer, differences, draw_curves, hardware, parser_of, report, save
from flax import nnx
from matplotlib.figure import Figure

import jaxnorm.nnx

GROUPS = 8


class FlaxNorm(nnx.GroupNorm):
    """Flax's norm and the activation after it."""

    def __call__(self, x):
        return jax.nn.silu(super().__call__(x))


NORMS = {"flax": FlaxNorm, "jaxnorm": partial(jaxnorm.nnx.GroupNorm, activation="silu")}


class Block(nnx.Module):
    """Two convolutions, each of what is normalised, with the time added between them; and the way around them."""

    def __init__(self, channels, features, time, layers):
        self.first_norm, self.second_norm = layers.norm(channels), layers.norm(features)
        self.first, self.second = layers.conv(channels, features), layers.conv(features, features)
        self.time = layers.linear(time, features)
        self.around = layers.linear(channels, features)

    def __call__(self, x, time):
        h = self.first(self.first_norm(x)) + self.time(time)[:, None, None]
        return self.around(x) + self.second(self.second_norm(h))


@dataclass
class Layers:
    """How the layers of one model are made."""

    norm: partial
    conv: partial
    linear: partial


class UNet(nnx.Module):
    """Noisy images and their times in, velocities out: down to half the size and up again."""

    def __init__(self, norm, *, channels, dtype, rngs):
        layers = Layers(
            partial(norm, num_groups=GROUPS, dtype=dtype, rngs=rngs),
            partial(nnx.Conv, kernel_size=(3, 3), dtype=dtype, rngs=rngs),
            partial(nnx.Linear, dtype=dtype, rngs=rngs),
        )
        widths, self.time_features = (channels, 2 * channels), 4 * channels
        block = partial(Block, time=self.time_features, layers=layers)
        self.time = layers.linear(self.time_features, self.time_features)
        self.enter = layers.conv(1, channels)
        self.down = nnx.List(block(a, a) for a in widths)
        self.halve = nnx.List(layers.conv(a, b, strides=2) for a, b in pairwise(widths))
        self.up = nnx.List(block(a + b, a) for a, b in pairwise(widths))
        self.norm = layers.norm(channels)
        self.leave = layers.conv(channels, 1)

    def __call__(self, images, times):
        time = jax.nn.silu(self.time(waves(times, self.time_features)))
        x, kept = self.enter(images), []
        for i, block in enumerate(self.down):
            x = block(self.halve[i - 1](x) if i else x, time)
            kept.append(x)
        for block, other in zip(reversed(self.up), reversed(kept[:-1]), strict=True):
            x = jax.image.resize(x, (*other.shape[:3], x.shape[3]), "nearest")
            x = block(jnp.concatenate([other, x], axis=-1), time)
        return self.leave(self.norm(x)).astype(jnp.float32)


def waves(times, features):
    """Sines and cosines of each time, from slow to fast."""
    angles = times[:, None] * 1000.0 ** jnp.linspace(0, 1, features // 2)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def draw_shapes(random, count, size):
    """Images of one disc, square or triangle each, of values between -1 and 1."""
    y, x = np.mgrid[:size, :size] / size
    kind, radius = random.integers(3, size=(count, 1, 1)), random.uniform(0.15, 0.3, (count, 1, 1))
    across, down = (axis - random.uniform(0.35, 0.65, (count, 1, 1)) for axis in (x, y))
    disc, square = np.hypot(across, down), np.maximum(abs(across), abs(down))
    triangle = np.maximum(down, 2 * abs(across) - down) / 1.3
    distance = np.choose(kind, [disc, square, triangle]) - radius
    return np.float32(np.clip(-distance * size, -1, 1))[..., None]


def loss_of(model, images, noise, times):
    """Mean square of the error of the velocity."""
    mixed = noise + times[:, None, None, None] * (images - noise)
    return jnp.square(model(mixed, times) - (images - noise)).mean()


@nnx.jit(static_argnames="steps")
def draw_images(model, noise, steps=32):
    """Images at the end of the way from noise."""

    def step(i, x):
        return x + model(x, jnp.full(len(x), i / steps)) / steps

    return jax.lax.fori_loop(0, steps, step, noise)


def train(name, options):
    """Trains a new model with one of the norms, and gives the run and the model."""

    def create(seed):
        return UNet(NORMS[name], channels=options.channels, dtype=jnp.dtype(options.dtype), rngs=nnx.Rngs(seed))

    def draw(random):
        images = draw_shapes(random, options.batch, options.size)
        return images, random.standard_normal(images.shape, np.float32), random.random(options.batch, np.float32)

    return Trainer(name, create, draw, loss_of, options.steps, options.rate).run(options.seed)


def plot(runs, model, options, count=8):
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes, below = figure.subplots(2, 1, height_ratios=(3, 1))
    draw_curves(axes, runs, f"{hardware()}, {options.dtype}", "training loss")
    noise = jax.random.normal(jax.random.key(options.seed), (count, options.size, options.size, 1))
    drawn = np.asarray(draw_images(model, noise))[..., 0]
    below.imshow(np.concatenate(drawn, axis=1), cmap="gray", vmin=-1, vmax=1)
    below.set_title("drawn by the model that was trained with jaxnorm", fontsize=9)
    below.axis("off")
    save(figure, options.out)


def parse_options():
    numbers = {"steps": (300, 2), "batch": (16, 1), "size": (32, 4), "channels": (16, 1)}
    parser = parser_of(__doc__, numbers, "train_images.png", rate=2e-3, dtype="float32", text=False)
    options = parser.parse_args()
    if options.channels % GROUPS:
        parser.error(f"--channels {options.channels}: must be a multiple of {GROUPS}, the number of groups")
    return options


def main():
    options = parse_options()
    print(f"Images of {options.size}x{options.size}; {hardware()}, {options.dtype}")
    runs, models = zip(*(train(name, options) for name in NORMS), strict=True)
    report(runs, options.batch, "images")
    differences(runs)
    plot(runs, models[1], options)


if __name__ == "__main__":
    main()
