"""Cross-entropy with integer labels.

**Of logits.** Differences to the largest z are taken. The gradient reads logits once more and writes theirs, in the
logits' own buffer where the program computed these and they are dead. Kernels serve all axes but a single one that is
not the last. Optax counts a negative label from the end; here its loss is NaN. A row with NaN or +inf, or whose classes
all have -inf, has the loss NaN. With `axis_name` the classes are split, of several axes the first, and labels are
numbers of the whole: each device reads its part by the kernel, and 16 or 20 bytes a row are exchanged. With an array as
`logit_scale` the product is made before the kernel, in float32.

**Of a product.** Its logits and their gradients take one buffer; that of the kernel is added up in float32. Of single
losses (reduction="none") the gradient computes the logits again; higher derivatives keep them all. A bias, or an array
as `logit_scale`, costs a chunk two or three float32 arrays of logits. Over a mesh each device takes chunks of its rows,
with all of kernel, whose gradient is summed over devices once; with `where` labels may be gathered. What kernel and
bias hold for classes of which no row reads anything reaches no result or gradient, nor does what a row of weight 0
holds, and the gradient of its weight is 0. That of other weights is of the divisor of a mean too, which is 1 where it
would be 0.

**What counts.** In both, sum and mean over classes are over those that `where` leaves, and a label may be another. A
row without any class does not count, as an ignored one: its loss and its logsumexp are 0, whatever its label is.
"""
