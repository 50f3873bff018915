"""A call of each public function that has an implementation, of an x of any shape that it takes."""

import math

import jax.numpy as jnp

import jaxnorm

INT8, _LOSS = jaxnorm.Quantization("int8"), jaxnorm.softmax_cross_entropy_with_integer_labels


def _qkv_norm_rotary(x):
    packed = math.prod(x.shape[-2:-1])
    kv_heads = packed // (3 if packed % 6 else 6)
    heads = packed - 2 * kv_heads
    scale, positions = jnp.ones(x.shape[-1:]), jnp.zeros(x.shape[:-2], int)
    return jaxnorm.qkv_norm_rotary(x, scale, scale, positions, heads=heads, kv_heads=kv_heads)


def _labels(x):
    return jnp.zeros(x.shape[:-1], int)


def _square(x):
    return jnp.zeros((x.shape[-1], x.shape[-1]))


# By the name of a public function it, of an x; of the others x is all that they cannot do without.
_OF_X = {
    "add_layer_norm": lambda x: jaxnorm.add_layer_norm(x, x),
    "add_rms_norm": lambda x: jaxnorm.add_rms_norm(x, x),
    "embedding": lambda x: jaxnorm.embedding(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), _labels(x)),
    "float8_linear": lambda x: jaxnorm.float8_linear(x, _square(x)),
    "gated_activation_quantized": lambda x: jaxnorm.gated_activation_quantized(x, quantization=INT8),
    "gated_rms_norm": lambda x: jaxnorm.gated_rms_norm(x, x, gate_first=True),
    "gated_rms_norm_quantized": lambda x: jaxnorm.gated_rms_norm_quantized(x, x, gate_first=True, quantization=INT8),
    "group_norm": lambda x: jaxnorm.group_norm(x, num_groups=math.gcd(32, x.shape[-1])),
    "layer_norm_quantized": lambda x: jaxnorm.layer_norm_quantized(x, quantization=INT8),
    "linear_cross_entropy": lambda x: jaxnorm.linear_cross_entropy(x, _square(x), _labels(x)),
    "qk_norm_rotary": lambda x: jaxnorm.qk_norm_rotary(x, x, positions=jnp.zeros(x.shape[:-2], int)),
    "qkv_norm_rotary": _qkv_norm_rotary,
    "quantize": lambda x: jaxnorm.quantize(x, INT8),
    "quantize_kernel": lambda x: jaxnorm.quantize_kernel(x, INT8),
    "quantized_dot": lambda x: jaxnorm.quantized_dot(x, jaxnorm.quantize_kernel(_square(x), INT8)),
    "rms_norm_add_rms_norm": lambda x: jaxnorm.rms_norm_add_rms_norm(x, x),
    "rms_norm_quantized": lambda x: jaxnorm.rms_norm_quantized(x, quantization=INT8),
    "sample": lambda x: jaxnorm.sample(x, uniform=0.5, return_log_prob=True),
    "segment_sum": lambda x: jaxnorm.segment_sum(x, jnp.zeros(x.shape[:1], int), 8),
    _LOSS.__name__: lambda x: _LOSS(x, _labels(x)),
}


def of_x(name):
    return _OF_X.get(name, getattr(jaxnorm, name))
