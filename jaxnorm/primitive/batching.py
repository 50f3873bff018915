"""What `jax.vmap` does with a call of an op.

Each way has a name and an example in CASES, for y = rms_norm(x, scale) with x (rows, cols) and scale (cols,), and its
gradients dx and dscale. In short: examples of rows are rows, an example's weights are those of a head
(`jaxnorm.primitive.weights`), and where no kernel takes that the formula runs under `jax.vmap`, and says so.
"""

import functools
from collections.abc import Container, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxnorm.primitive import broadcast, fallback, weights
from jaxnorm.primitive.op import Record, RowSpec
from jaxnorm.primitive.rules import RowRules, at_front, fold, leaves_of


class Case(NamedTuple):
    """How the examples of a batch are computed."""

    name: str
    example: str
    calls: int  # native ones
    has_weights: bool = False  # whether each example has weights for itself, or their gradients, as a head has
    sums: Literal["native", "formula"] | None = None  # how the gradients that are sums over an example's rows come


CASES = (
    Case("rows", "vmap(y, (0, None))", 1),
    Case("rows", "vmap(dx, (0, None))", 1),
    Case("weights", "vmap(y, (0, 0))", 1, has_weights=True),
    Case("weights", "vmap(dx, (0, 0))", 1, has_weights=True),
    Case("sums", "vmap(dscale, (0, None))", 1, has_weights=True, sums="native"),
    # There is no sum to be made over one row, and of some gradients no kernel makes one for each example.
    Case("sums apart", "vmap(dscale, (0, None)) of one row", 0, sums="formula"),
    Case("weights, sums apart", "vmap(dscale, (0, 0)) of one row", 0, has_weights=True, sums="formula"),
    # What all examples share is computed once, and the kernel cannot: also of examples of statistics alone.
    Case("formula", "vmap(y, (None, 0))", 0),
    Case("formula", "vmap(dscale, (None, 0))", 0),
)


class Batched(RowRules):
    """Rules with what those of `jax.vmap` have in common."""

    def batch_in_front(self, spec: RowSpec, records: Sequence[Record], batch: Sequence[Record]) -> list[Record] | None:
        """The operands of a batch in the cases "rows" and "weights", which is folded into both; None in "formula".

        `batch` has the batch axis of each array in `records`, whose first is x.
        """
        fields = [(i, name) for i, record in enumerate(records) for name in record._fields]
        values, axes = ({(i, name): getattr(of[i], name) for i, name in fields} for of in (records, batch))
        rows, kept, of_formula = (
            [field for field in fields if self.role(field[1]).batch == how] for how in ("fold", "weight", "formula")
        )
        moving = {field: jax.tree.leaves(axes[field]) for field in fields}
        of_rows = [field for field in rows if self.role(field[1]).is_of_rows]
        if any(moving[field] for field in of_formula) or not any(moving[field] for field in of_rows):
            return None
        if self.op.weights_batch:
            x, x_axis = records[0][0], batch[0][0]
            align = functools.partial(self.aligned, spec, [name for _, name in kept])
            whole = weights.batch(x, x_axis, spec.row_ndim, [values[f] for f in kept], [axes[f] for f in kept], align)
        else:
            whole = None if any(moving[field] for field in kept) else [values[field] for field in kept]
        if whole is None:
            return None
        folded = self.fold([(name, values[i, name], axes[i, name]) for i, name in rows], 0)
        values |= dict(zip([*rows, *kept], [*folded, *whole], strict=True))
        return [type(record)(*(values[i, name] for name in record._fields)) for i, record in enumerate(records)]

    def fold(self, arrays: Sequence[tuple[str, Any, Any]], x: int, repeated: Container[str] = frozenset()) -> list[Any]:
        """Arrays of rows, each with its name and the axis of its batch, with that as the leading axis.

        An array that has no batch is repeated over it, or 1 long where it broadcasts against x, which stands there. Of
        those that are `repeated` each example has its own gradient.
        """
        broadcasts = [self.role(name).broadcasts and array is not None for name, array, _ in arrays]
        pairs = zip(broadcasts, arrays, strict=True)
        stays = [ones and axis is None and name not in repeated for ones, (name, _, axis) in pairs]
        moving = [(array, axis) for stay, (_, array, axis) in zip(stays, arrays, strict=True) if not stay]
        values, axes = zip(*moving, strict=True)
        folded = iter(fold(values, axes))
        whole = [
            jnp.expand_dims(array, 0) if stay else next(folded)
            for stay, (_, array, _) in zip(stays, arrays, strict=True)
        ]
        fits = [ones and self.role(name).fitted for ones, (name, *_) in zip(broadcasts, arrays, strict=True)]
        return [broadcast.fitted(whole[x], array) if fit else array for fit, array in zip(fits, whole, strict=True)]

    def is_scattered(self, arrays: Record) -> bool:
        """Whether a weight that broadcasts against x, the first array, differs along more runs of axes than kernels
        follow."""
        roles = ((self.role(name), array) for name, array in leaves_of(arrays) if name != "stats")
        weights = [array for role, array in roles if role.broadcasts and not role.fitted]
        return any(broadcast.runs(arrays[0].shape, weight.shape) > broadcast.MOST_RUNS for weight in weights)

    def rows_of(self, arrays: Record) -> list[Any]:
        """The arrays of a NamedTuple that are neither statistics nor weights nor the same for all rows."""
        return [array for name, array in leaves_of(arrays) if name != "stats" and self.role(name).is_of_rows]

    def batch_formula(self, leaves: Any, dims: Any, **params: Any) -> Any:
        if self.direction != "linear" and not self.op.calls_others:
            operands = self.named_operands(params["tree"], leaves)
            why = "no kernel takes examples of these operands, as jax.vmap makes them"
            fallback.traced(self.op, params["spec"], operands, self.direction, lambda: why)
        return at_front(jax.vmap(lambda *values: self.formula(*values, **params), in_axes=tuple(dims))(*leaves))
