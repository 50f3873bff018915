"""The U-Net that `bench model` times: residual blocks of GroupNorm, silu and convolution, as in diffusion models.

Each block has two convolutions of what is normalised, with a product of the time's features added between them, as in
DDPM (https://arxiv.org/abs/2006.11239); there is no attention. Images have channels last. As in `bench.models`,
parameters are float32, and cast to bfloat16 where they are used, but for those of norms; activations are bfloat16.
"""

import functools
import itertools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

import jaxnorm
from bench import model_norms, models

COLORS = 4  # of an image: the latents of a diffusion model


@dataclass(frozen=True)
class Spec:
    """A model and its batch."""

    name: str
    widths: tuple[int, ...]  # the channels of each level; each has half the positions of the one before along an axis
    blocks: int = 2  # of a level, on the way down and on the way up
    batch: int = 8
    size: int = 64  # positions along an axis of an image
    groups: int = 32  # of channels that a norm takes together
    language = False

    @property
    def time(self):
        """The features of the time."""
        return 4 * self.widths[0]

    def group_norm(self, x, weights, **options):
        return jaxnorm.group_norm(x, *weights, num_groups=self.groups, **options)


WIDE = Spec("U-Net, 320 to 1280", (320, 640, 1280))
NARROW = Spec("U-Net, 192 to 768", (192, 384, 768))


def small(spec):
    """The same code at the size of a toy."""
    return replace(spec, widths=(16, 32), blocks=1, batch=4, size=8, groups=4)


def init(spec, seed=0):
    """The parameters."""
    keys = map(functools.partial(jax.random.fold_in, models.random_key(seed)), itertools.count())

    def kernel(*dims):
        return jax.random.normal(next(keys), dims) / math.sqrt(math.prod(dims[:-1]))

    def norm(channels):
        return jnp.ones(channels), jnp.zeros(channels)

    def block(channels, features):
        around = {} if channels == features else {"around": kernel(1, 1, channels, features)}
        first = {"first_norm": norm(channels), "first": kernel(3, 3, channels, features)}
        second = {"second_norm": norm(features), "second": kernel(3, 3, features, features)}
        return {"time": kernel(spec.time, features), **first, **second, **around}

    def level(channels, features):
        return [block(channels, features) for _ in range(spec.blocks)]

    first, last = spec.widths[0], spec.widths[-1]
    pairs = list(itertools.pairwise(spec.widths))
    return {
        "enter": kernel(3, 3, COLORS, first),
        "down": [level(width, width) for width in spec.widths],
        "halve": [kernel(3, 3, a, b) for a, b in pairs],
        "middle": block(last, last),
        "up": [level(2 * width, width) for width in spec.widths],
        "double": [kernel(3, 3, b, a) for a, b in pairs],
        "norm": norm(first),
        "leave": kernel(3, 3, first, COLORS),
    }


def batch(spec, seed=1):
    """Random images with the features of their times, and the noise that is to be found in them."""
    image, noise, time = jax.random.split(models.random_key(seed), 3)
    dims = (spec.batch, spec.size, spec.size, COLORS)
    images = jax.random.normal(image, dims, jnp.bfloat16)
    return (images, jax.random.normal(time, (spec.batch, spec.time), jnp.bfloat16)), jax.random.normal(noise, dims)


def loss(spec, variant, params, inputs, targets):
    """Mean square of the error of the noise."""
    return jnp.square(output(norm_of(spec, variant), params, *inputs).astype(jnp.float32) - targets).mean()


def norm_of(spec, variant):
    """GroupNorm and silu as a function of x and the weights; a variant that takes neighbours in computes both."""
    name, joins, *_ = model_norms.VARIANTS[variant]
    if name is None:
        return lambda x, weights: jax.nn.silu(x)
    if name == "flax":
        return lambda x, weights: jax.nn.silu(flax_norm(spec, x, weights))
    options = model_norms.implementation_of(name)
    if joins:
        return lambda x, weights: spec.group_norm(x, weights, activation="silu", **options)
    return lambda x, weights: jax.nn.silu(spec.group_norm(x, weights, **options))


def flax_norm(spec, x, weights):
    def in_groups(array):
        return array.reshape(*array.shape[:-1], spec.groups, -1)

    return model_norms.flax_norm(in_groups(x), map(in_groups, weights), axes=(1, 2, 4)).reshape(x.shape)


def output(norm, params, images, time):
    """The noise that the model finds."""

    def block(x, weights):
        h = convolution(norm(x, weights["first_norm"]), weights["first"])
        h = h + (jax.nn.silu(time) @ weights["time"].astype(time.dtype))[:, None, None]
        h = convolution(norm(h, weights["second_norm"]), weights["second"])
        return h + (convolution(x, weights["around"]) if "around" in weights else x)

    x, kept = convolution(images, params["enter"]), []
    for depth, level in enumerate(params["down"]):
        x = convolution(x, params["halve"][depth - 1], stride=2) if depth else x
        for weights in level:
            x = block(x, weights)
            kept.append(x)
    x = block(x, params["middle"])
    for depth, level in reversed(list(enumerate(params["up"]))):
        for weights in level:
            x = block(jnp.concatenate([x, kept.pop()], axis=-1), weights)
        if depth:
            x = convolution(x.repeat(2, axis=1).repeat(2, axis=2), params["double"][depth - 1])
    return convolution(norm(x, params["norm"]), params["leave"])


def convolution(x, kernel, stride=1):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel.astype(x.dtype), (stride, stride), "SAME", dimension_numbers=layout)
