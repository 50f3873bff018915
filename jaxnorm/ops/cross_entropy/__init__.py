"""Cross-entropy with integer labels.

**Of logits.** The largest z of a row is subtracted first. The gradient reads logits again and is written over them, if
the program computed them and does not read them later. Kernels serve the last axis, or several axes. A negative label
has the loss NaN (Optax counts it from the end), and so has a row with NaN or +inf, or with -inf for all classes.
`axis_name` splits the classes (of several axes, the first), and labels are numbers of the whole: each device reads its
part by the kernel, and 16 or 20 bytes a row are exchanged. An array as `logit_scale` multiplies before the kernel, in
float32.

**Of a linear layer.** A chunk's logits and their gradient share a buffer; the kernel's gradient is added up in float32.
With reduction="none" the gradient computes the logits again; higher derivatives keep them all. A bias, or an array as
`logit_scale`, costs a chunk two or three float32 arrays of logits. Over a mesh each device takes chunks of its rows and
all of kernel, whose gradient is summed over devices once; with `where` labels may be gathered. Classes that no row
reads may hold NaN in kernel and bias, and rows of weight 0 in x: it reaches no result or gradient. A weight of 0 has
the gradient 0; that of other weights includes the divisor of the mean, which is 1 where it would be 0.

**What counts.** Sums and means over classes take those that `where` leaves; the label may be another. A row without any
class does not count, like an ignored one: its loss and its logsumexp are 0, whatever its label.
"""
