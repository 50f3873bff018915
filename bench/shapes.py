"""The one table of shapes: it drives the tests and the benchmarks, and imports nothing of the package.

A shape is written as the model hands it to its norm. Tests shrink the leading axes with `few_rows`, which changes
nothing about how a row is computed: a launch plan depends on the row's length and dtypes only.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Shape(NamedTuple):
    name: str
    dims: tuple[int, ...]
    axes: int = 1  # how many trailing axes are normalised

    @property
    def rows(self) -> int:
        return math.prod(self.dims[: len(self.dims) - self.axes])

    @property
    def cols(self) -> int:
        return math.prod(self.dims[len(self.dims) - self.axes :])


# Norms of published models: (batch, sequence, features), or (batch, sequence, heads, head_dim) for a norm over heads.
MODELS = (
    Shape("llama3 8B", (2, 2048, 4096)),
    Shape("llama3 70B", (1, 2048, 8192)),
    Shape("qwen3 8B qk-norm", (2, 2048, 32, 128)),  # the shortest rows in wide use, and the most of them
    Shape("qwen3 30B-A3B", (2, 2048, 2048)),
    Shape("gemma3 27B", (2, 2048, 5376)),
    Shape("gemma3 qk-norm", (2, 2048, 16, 256)),
    Shape("gpt-oss 20B", (2, 2048, 2880)),  # not a power of two times a vector width of 256 threads
    Shape("deepseek v3", (1, 2048, 7168)),
    Shape("deepseek v3 kv latent", (2, 4096, 512)),
    Shape("mamba2 2.7B", (2, 2048, 5120)),
    Shape("ViT-L/16", (64, 197, 1024)),  # 197 tokens: rows do not come in powers of two either
    Shape("BERT base", (32, 512, 768)),
)

# Timed only: the tests have the same row already, and fewer of it.
LARGE_MODELS = (Shape("qwen3 qk-norm, 1 M rows", (8, 4096, 32, 128)),)

# Row lengths of the residual streams above, one of each: what is timed with a residual add.
STREAMS = tuple(shape for shape in MODELS if shape.name in ("llama3 8B", "gpt-oss 20B", "deepseek v3", "ViT-L/16"))

# Of which y is padded with zeros, to whole tiles of the product that follows.
(PADDED,) = (shape for shape in STREAMS if shape.name == "gpt-oss 20B")

# Of gated norms: Mamba2's after its scan, with and without groups of 1024 columns, and Qwen3-Next's of each head.
MAMBA2 = tuple(Shape(f"mamba2 {cols}", (2, 2048, cols)) for cols in (5120, 8192))
QWEN3_NEXT = Shape("qwen3-next heads", (2, 4096, 32, 128))

# Of norms with a scale for each head, 128 of them.
HEADS = 128
PER_HEAD = (Shape("qk-norm, 1 M rows", (8192, HEADS, 128)), Shape("qk-norm 256", (4096, HEADS, 256)))

# Attention scores of one head, queries by keys; of many heads; and of queries behind a cache.
SCORES = Shape("scores", (4096, 4096))
HEADS_OF_SCORES = Shape("scores", (2, 16, 2048, 2048))
CACHED_SCORES = Shape("cached scores", (32, 2048, 8192))

# Logits of losses: tokens by classes.
VOCABULARIES = tuple(
    Shape(f"{classes} classes", (tokens, classes))
    for tokens, classes in ((8192, 32_000), (8192, 50_257), (8192, 128_256), (4096, 262_144))
)

# (sequences, tokens, heads of queries and keys, head size), of which KEYS are of keys. A token is decoded.
KEYS = 8
ROTARY = tuple(
    Shape(name, (batch, tokens, queries + KEYS, size))
    for name, batch, tokens, queries, size in (
        ("Llama 3 8B", 4, 2048, 32, 128),
        ("Llama 3 70B", 2, 2048, 64, 128),
        ("Gemma 3 12B", 4, 2048, 16, 256),
        ("heads of 64", 8, 2048, 32, 64),
        ("a token of 4", 4, 1, 32, 128),
        ("a token of 64", 64, 1, 32, 128),
    )
)

# (examples, positions..., channels) of images for GroupNorm. The first three are the largest.
IMAGES = (
    Shape("high", (8, 256, 256, 128)),
    Shape("middle", (8, 128, 128, 256)),
    Shape("low", (8, 64, 64, 512)),
    Shape("one image", (1, 512, 512, 128)),
    Shape("bottom", (2, 32, 32, 1280)),
    Shape("many", (64, 16, 16, 640)),
    Shape("odd channels", (8, 64, 64, 63)),
)

# What is between the products of an MLP: tokens by columns of the result.
GATES = (
    Shape("Llama 3 8B", (8192, 14336)),
    Shape("Llama 3 70B", (4096, 28672)),
    Shape("Gemma 2 2B", (8192, 9216)),
    Shape("an expert of Qwen3 30B-A3B", (65536, 768)),
    Shape("odd columns", (8192, 10001)),
    Shape("a token of 32", (32, 14336)),
)

# What is rounded to float8 around products.
ROUNDED = (
    Shape("Llama 3 8B, x", (8192, 4096)),
    Shape("Llama 3 8B, of gate and up", (8192, 28672)),
    Shape("Llama 3 8B, of down", (8192, 14336)),
    Shape("Llama 3 8B, kernel of gate", (4096, 14336)),
    Shape("Llama 3 8B, kernel of down", (14336, 4096)),
    Shape("a width of 2048", (8192, 2048)),
)

# Tables of embeddings, of which so many rows are looked up; of the others 8192.
TABLES = (
    Shape("Qwen3 4B", (151_936, 2560)),
    Shape("Gemma 3 1B", (262_144, 1152)),
    Shape("GPT-2, 65536 tokens", (50_257, 768)),
)
LOOKED_UP = {"GPT-2, 65536 tokens": 65_536}

# What is summed by segments.
SEGMENTED = Shape("1 M rows", (2**20, 128))

# One token for each of a few sequences: launch overhead and latency, not bandwidth.
DECODE = (Shape("decode 1", (1, 4096)), Shape("decode 32", (32, 4096)), Shape("decode 256", (256, 8192)))

# Row lengths that no vector width, warp, block or cluster divides.
ODD = (
    Shape("one element", (5, 1)),
    Shape("two elements", (5, 2)),
    Shape("prime below a vector", (7, 7)),
    Shape("prime below a warp", (9, 31)),
    Shape("prime above a warp's vectors", (6, 257)),
    Shape("prime below 1 K", (5, 1021)),
    Shape("one more than a power of two", (3, 4097)),
    Shape("odd multiple of a half vector", (3, 12_300)),
    Shape("odd and long", (3, 100_003)),
    Shape("odd million", (2, 1_000_003)),
)

# The like, with enough rows to time them; 50257 is GPT-2's vocabulary.
LARGE_ODD = (
    Shape("odd 1021", (65_536, 1021)),
    Shape("odd 1153", (57_344, 1153)),
    Shape("odd 4097", (16_384, 4097)),
    Shape("odd 50257", (1280, 50_257)),
    Shape("odd 100003", (1024, 100_003)),
    Shape("odd 300007", (224, 300_007)),
)

# More than one normalised axis, more than two axes, one row, no axis but the normalised one.
RANKS = (
    Shape("one row, rank 1", (1000,), 1),
    Shape("two normalised axes", (6, 16, 48), 2),
    Shape("three normalised axes, odd", (4, 3, 5, 7), 3),
    Shape("every axis normalised", (12, 34), 2),
    Shape("many leading axes", (2, 1, 3, 2, 64), 1),
)

GRID_COLS = (256, 1024, 4096, 8192, 16_384, 65_536, 262_144)
GRID_BYTES = 2**28  # an array of 256 MiB is far beyond any cache


def grid(itemsize: int, nbytes: int = GRID_BYTES, lengths: tuple[int, ...] = GRID_COLS) -> tuple[Shape, ...]:
    """Every row length of the comparison with other packages, each array ``nbytes`` large."""
    return tuple(Shape(f"grid {cols}", (max(1, nbytes // itemsize // cols), cols)) for cols in lengths)


def few_rows(shape: Shape, elements: int = 2**17) -> Shape:
    """The same rows, and as few of them (one at least, an odd number) as ``elements`` elements hold."""
    if shape.rows * shape.cols <= elements:
        return shape
    rows = max(1, elements // shape.cols)
    return shape._replace(dims=(rows - (rows % 2 == 0), *shape.dims[len(shape.dims) - shape.axes :]))
