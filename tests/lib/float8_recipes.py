"""Recipes of `float8_linear` that differ in what is computed and kept."""

from jaxnorm import Float8Recipe

RECIPES = {
    "default": Float8Recipe(),
    "inputs": Float8Recipe(save="inputs"),
    "tensor": Float8Recipe(scaling="tensor"),
    "wide weight gradient": Float8Recipe(weight_gradient="compute"),
}
