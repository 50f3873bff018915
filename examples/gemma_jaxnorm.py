"""The model of gemma.py on jaxnorm's kernels: what its user writes. The model's own file and parameters stay.

`port` puts functions in place of the calls of three classes:

- a norm alone is `rms_norm`;
- in attention, the norms of queries and keys and their rotation are one `qk_norm_rotary`;
- in the decoder, the norm after a block, the addition and the norm before the next are one `rms_norm_add_rms_norm`.
"""

from itertools import pairwise

import gemma

import jaxnorm


def norm(module, x):
    return jaxnorm.rms_norm(x, module.scale[...], scale_offset=1.0)


def attention(module, x):
    q, k, v = module.project(x)
    scales = module.query_norm.scale[...], module.key_norm.scale[...]
    q, k = jaxnorm.qk_norm_rotary(q, k, *scales, theta=module.config.theta, scale_offset=1.0)
    return module.attend(q, k, v)


def decoder(model, tokens):
    """The hidden states: what a layer gives is normalised, added, and normalised for the next, all in one call."""
    halves = []  # the norm before, the layer, the norm after
    for block in model.blocks:
        halves.append((block.pre_attention_norm, block.attention, block.post_attention_norm))
        halves.append((block.pre_perceptron_norm, block.perceptron, block.post_perceptron_norm))
    stream = model.embedded(tokens)
    y = halves[0][0](stream)
    for (_, layer, after), (before, *_) in pairwise([*halves, (model.final_norm,)]):
        scales = after.scale[...], before.scale[...]
        y, stream = jaxnorm.rms_norm_add_rms_norm(layer(y), stream, *scales, scale_offset=1.0)
    return y


def port_norms(model):
    """The norms alone."""
    return jaxnorm.replace_norms(model, {gemma.RMSNorm: norm})


def port(model):
    """The norms with their neighbours."""
    return jaxnorm.replace_norms(model, {gemma.RMSNorm: norm, gemma.Attention: attention, gemma.Gemma: decoder})


def loss_of(model, tokens):
    """`gemma.loss_of`, without ever having all logits."""
    kernel = model.embed.embedding[...].T
    return jaxnorm.linear_cross_entropy(model(tokens[:, :-1]), kernel, tokens[:, 1:], soft_cap=model.config.soft_cap)


def loss_of_logits(model, tokens):
    """The same of logits, whose gradient takes their place."""
    logits = model.embed.attend(model(tokens[:, :-1]))
    losses = jaxnorm.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:], soft_cap=model.config.soft_cap)
    return losses.mean()
