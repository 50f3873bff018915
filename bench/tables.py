"""The results as tables in README.md and docs/, so that no number there is typed.

    python -m bench tables           # writes them
    python -m bench tables --check   # fails if they are not what the results say

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, with a line about its run above it. Where a page has
`<!-- drawn: NAME -->`, MkDocs draws the table (`tools/doc_results.py`). README's picture is a table that is drawn as
SVG.
"""

import difflib
import functools
import re
import statistics
from pathlib import Path

from bench import report, shapes

PICTURE = Path("docs/training.svg")
MARKED = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end -->", re.DOTALL)
DRAWN = re.compile(r"<!-- drawn: (\S+) -->")
# In the order of the tables; a run may have fewer, or others, which come last.
OPS = [report.op_name(kind, way) for way in ("forward", "backward", "step") for kind in ("rms", "layer")]
DTYPES = ["float32", "bfloat16", "float16"]
CPU_SHAPE = (4096, 4096)
MODELS = frozenset(shape.name for shape in shapes.MODELS + shapes.LARGE_MODELS)
# What a user gets who asks for nothing: the norms alone, and what takes the neighbours in.
DEFAULTS = ("jaxnorm-default-norm", "jaxnorm-default")
STEPS, DECODING = "models.md#in-percent-of-a-step", "models.md#decoding"
LOOKUPS = "models.md#the-lookup-of-tokens"
BONSAI = {"vae": "VAE", "gemma3": "Gemma 3", "qwen3": "Qwen3", "dit": "DiT", "vit": "ViT"}


def add_arguments(parser):
    parser.add_argument("--pages", type=Path, nargs="+", help="the Markdown files (default: README.md and docs/)")
    parser.add_argument("--results", type=Path, default=Path("bench/results"), help="the folder of the JSON files")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something would change")


def main(args):
    changed = False
    for page in args.pages or [Path("README.md"), *sorted(Path("docs").rglob("*.md")), PICTURE]:
        old = page.read_text()
        new = table("picture", args.results) if page == PICTURE else render(old, args.results)
        changed |= new != old
        if args.check:
            lines = difflib.unified_diff(old.splitlines(), new.splitlines(), str(page), "results", lineterm="")
            print(*lines, sep="\n")
        elif new != old:
            page.write_text(new)
    return int(args.check and changed)


def render(text, folder):
    """The text with every table between its marks made anew."""
    return MARKED.sub(lambda match: f"<!-- table: {match[1]} -->\n{table(match[1], folder)}\n<!-- end -->", text)


def drawn(text, folder):
    """The text with a table in the place of each mark that stands for one."""
    return DRAWN.sub(lambda match: table(match[1], folder), text)


def table(name, folder):
    if name not in TABLES:
        raise SystemExit(f"no table is called {name}; there are {', '.join(TABLES)}")
    lines_of, *runs = TABLES[name]
    found = {run: report.load(folder / run) for run in runs}
    missing = [run for run, results in found.items() if results is None]
    return f"Not measured yet: {', '.join(missing)}." if missing else "\n".join(lines_of(*found.values()))


def about(header, *more):
    """What ran where, and the empty line that Markdown wants before a table."""
    device = next((header[key] for key in ("gpu", "cpu", "device") if key in header), "unknown device")
    cores = f", {header['cores']} cores" if "cores" in header else ""
    command = header["command"].removeprefix("python -m ")  # of that commit
    run = f"{device}{cores}, JAX {header['jax']}, {header['date']}, commit {header['commit']}: `{command}`."
    return [" ".join([run, *more]), ""]


def code(op):
    """The function's name as code: `rms_norm` forward."""
    name, _, rest = op.partition(" ")
    return f"`{name}` {rest}".strip()


def position(key):
    """Where (op, dtype) stands: plain ops before those that say more after a comma."""
    (op, _, more), dtype = key[0].partition(", "), key[1]
    places = (known.index(name) if name in known else len(known) for name, known in ((op, OPS), (dtype, DTYPES)))
    return more, *places, op, dtype


def is_step(row):
    return row["op"].partition(", ")[0].endswith(" step")


def wholes(*runs):
    """Every column of every run as it is."""
    return [line for run in runs for line in [*about(run["header"]), *report.table_of(run["columns"], run["rows"]), ""]]


def chosen(results, columns):
    """These columns of every row."""
    return [*about(results["header"]), *report.table_of(columns, results["rows"])]


def headline(results):
    """One line about all shapes."""
    header, rows = results["header"], results["rows"]
    if "cpu" in header:  # programs that run alone and in a chain
        return [ratios(f"{header['cpu']}, {header['cores']} cores, {len(rows)} programs with a single op", rows)]
    steps = [row for row in rows if is_step(row) and row["x XLA"]]
    return [ratios(f"{header['gpu']}, {len(steps)} programs with a single op, forward and backward", steps)]


def ratios(what, rows):
    """How rows compare with XLA, the worst by name."""
    mean = statistics.geometric_mean(row["x XLA"] for row in rows)
    low, high = (pick(rows, key=lambda row: row["x XLA"]) for pick in (min, max))
    ends = (f"{of['x XLA']:.2f} ({code(of['op'])}, {of['dtype']}, {of['M']}x{of['N']})" for of in (low, high))
    return f"- {what}: {mean:.2f} times as fast as XLA's code in geometric mean, from {' to '.join(ends)}."


def grid(results):
    """GB/s, and how many times as fast as XLA: a line for each op and dtype, a column for each row length."""
    everything = [row for row in results["rows"] if row["shape"].startswith("grid ")]
    rows = [row for row in everything if not is_step(row)]
    lengths = sorted({row["N"] for row in rows})
    cells = {(row["op"], row["dtype"], row["N"]): f"{row['GB/s']:.0f} ({row['x XLA']:.2f})" for row in rows}
    lines = [
        [f"{code(op)}, {dtype}", *(cells.get((op, dtype, length), "-") for length in lengths)]
        for op, dtype in sorted({(row["op"], row["dtype"]) for row in rows}, key=position)
    ]
    copy = statistics.median(row["copy GB/s"] for row in rows)
    steps = ratios("The result and all gradients in one program", [row for row in everything if is_step(row)])
    columns = ["row length", *map(str, lengths)]
    return [*about(results["header"], f"A copy reaches {copy:.0f} GB/s."), *report.table(columns, lines), "", steps]


def models(results):
    """Microseconds, and how many times as fast as XLA: a line for each shape of a model."""
    rows = [row for row in results["rows"] if row["dtype"] == "bfloat16" and row["shape"] in MODELS]
    ops = sorted({row["op"] for row in rows}, key=lambda op: position((op, "bfloat16")))
    lines = {}
    for row in rows:
        cells = lines.setdefault(f"{row['shape']}, {row['M']}x{row['N']}", {})
        cells[row["op"]] = f"{row['us']:.1f} ({row['x XLA']:.2f})"
    return about(results["header"]) + report.table(
        ["bfloat16", *map(code, ops)], [[shape, *(cells.get(op, "-") for op in ops)] for shape, cells in lines.items()]
    )


def cpu(results):
    """Milliseconds of one shape, for all dtypes beside each other, and what all cells have in common."""
    rows = results["rows"]
    cells = {(row["op"], row["dtype"]): row for row in rows if (row["M"], row["N"]) == CPU_SHAPE}
    keys = sorted(cells, key=position)
    ops, dtypes = (list(dict.fromkeys(key[i] for key in keys)) for i in (0, 1))
    columns = ["x".join(map(str, CPU_SHAPE)), *(name for dtype in dtypes for name in (f"{dtype} ms", "XLA", "ratio"))]
    measured = ("ms", "XLA ms", "x XLA")
    lines = [[code(op), *(f"{cells[op, dtype][key]:.1f}" for dtype in dtypes for key in measured)] for op in ops]
    groups = {}
    for row in rows:
        groups.setdefault(report.CHAINED if row["op"].endswith(f", {report.CHAINED}") else "alone", []).append(row)
    summary = [ratios(f"All {len(group)} cells, {name}", group) for name, group in groups.items()]
    return [*about(results["header"]), *report.table(columns, lines), "", *summary]


def steps(*runs, program=""):
    """What the norms are of a whole step of a model, and what jaxnorm changes of it, in percent: gains first.

    A column of which nothing was measured is left out.
    """
    found = {names: variants for results in runs for names, variants in programs_of(results, "", program).items()}
    lines = [step(names, variants) for names, variants in found.items()]
    lines.sort(key=lambda line: line[0], reverse=True)
    columns = [
        "program",
        "XLA ms",
        "norms %",
        "the norms",
        "with their neighbours",
        "against Flax's norms",
        "against XLA in float32",
        "scatter %",
    ]
    cells = [column for column in zip(columns, *(cells for _, cells in lines), strict=True) if {*column[1:]} != {"-"}]
    columns, *lines = map(list, zip(*cells, strict=True))
    return [*(line for results in runs for line in about(results["header"])), *report.table(columns, lines)]


def step(names, variants):
    """(the best change in percent, the cells of the line) of one program of a model."""
    xla = variants["xla"]
    changes = {norms: change(variants, norms) for norms in DEFAULTS if norms in variants}
    cells = [f"{xla['ms']:.2f}", f"{xla['norms us'] / xla['ms'] / 10:.1f}"]
    cells += [faster(changes.get(norms)) for norms in DEFAULTS]
    cells += [against(of, variants) for of in ("flax", "xla-float32")]
    return max(changes.values()), [", ".join(names), *cells, scatter(variants)]


def change(variants, norms, of="xla"):
    """In percent of a program, of paired runs: by what it takes longer than the one without norms beside it."""
    xla = variants[of]
    return (xla["norms us"] - variants[norms]["norms us"]) / xla["ms"] / 10


def against(of, *programs):
    return spread([change(variants, DEFAULTS[1], of) for variants in programs if of in variants])


def scatter(*programs):
    """Half the interquartile range of XLA's program in percent of it, the largest of several programs."""
    return share(max((variants["xla"] for variants in programs), key=lambda row: row["± us"] / row["ms"]), "ms")


def share(row, time):
    return f"±{row['± us'] / row[time] / 10:.1f}"


def whole_programs(looked_up, compared, qwen, blocks, decoded):
    """A few whole programs, each with a link to its table."""
    lines = [
        of_layers(looked_up, "GPT-2-like"),
        *(line(compared, model, "train step") for model in ("U-Net", "Llama-like, packed")),
        with_loss(qwen),
        *(of_bonsai(blocks, model) for model in ("vae", "gemma3", "qwen3")),
        line(decoded, "Llama-like, joint, decode", page=DECODING),
    ]
    return report.table(["whole programs", "GPU", "against XLA's code", "against Flax's norms", "scatter %"], lines)


def line(results, model, program="", page=STEPS):
    """Of several programs the least change and the largest."""
    programs = programs_of(results, model, program).values()
    changes = spread([change(variants, DEFAULTS[1]) for variants in programs])
    return [*linked(results, page, model, program), changes, against("flax", *programs), scatter(*programs)]


def linked(results, page, *names):
    """The first two cells of a line."""
    _, gpu, *_ = results["header"]["device"].split()
    return [f"[{', '.join(filter(None, names))}]({page})", gpu]


def of_layers(results, model):
    """What `replace_layers` gives in place of Flax's layers, and beside it the lookup alone."""
    rows = {row["variant"]: row for row in results["rows"] if row["model"] == model}
    names = linked(results, LOOKUPS, model, "train step", "by replace_layers alone")
    alone = f"{faster(rows['jaxnorm-lookup']['faster %'])} by the lookup alone"
    return [*names, alone, faster(rows["jaxnorm-layers"]["faster %"]), share(rows["flax"], "ms")]


def promise(results):
    """The first sentence of README.md."""
    _, gpu, alone, gain, scatter_of_it = of_layers(results, "GPT-2-like")
    of_lookup = alone.removesuffix("the lookup alone")
    return [
        "One line, `jaxnorm.replace_layers(model)`, makes the training step of a GPT-2-like Flax model "
        f"[{gain}](docs/benchmarks/{LOOKUPS}) on an {gpu} ({scatter_of_it} % from run to run): {of_lookup}the gradient "
        "of the token embedding alone, the rest by the model's norms. Parameters and checkpoints stay as they are."
    ]


def picture(looked_up, *runs):
    """How much faster training steps are, as SVG: a bar for each model."""
    rows = {row["variant"]: row for row in looked_up["rows"] if row["model"] == "GPT-2-like"}
    bars = [("GPT-2-like, replace_layers", "H200", rows["jaxnorm-layers"]["faster %"])]  # the one beside Flax's layers
    for results in runs:
        _, gpu, *_ = results["header"]["device"].split()
        steps = {model: variants for (model, way), variants in programs_of(results).items() if way == "train step"}
        saved = {model: change(variants, DEFAULTS[1]) for model, variants in steps.items()}
        bars += [(model, gpu, 100 * percent / (100 - percent)) for model, percent in saved.items()]
    bars.sort(key=lambda bar: bar[2], reverse=True)
    colors = {"H100": "#4c78a8", "H200": "#f58518"}
    lines = [
        f'<text x="240" y="{56 + 26 * i}" text-anchor="end">{model} ({gpu})</text>'
        f'<rect x="250" y="{43 + 26 * i}" width="{10 * percent:.0f}" height="18" fill="{colors[gpu]}"/>'
        f'<text x="{256 + 10 * percent:.0f}" y="{56 + 26 * i}">{percent:.1f} %</text>'
        for i, (model, gpu, percent) in enumerate(bars)
    ]
    size = f'width="720" height="{50 + 26 * len(bars)}"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
        f'<rect {size} fill="#fff"/>',
        '<text x="10" y="16">Training steps a second, one GPU, bfloat16: percent more than</text>',
        f'<text x="10" y="34"><tspan fill="{colors["H100"]}">with XLA\'s code for the same formulas</tspan>, or',
        f'<tspan fill="{colors["H200"]}">with Flax\'s layers</tspan></text>',
        *lines,
        "</svg>",
        "",
    ]


def with_loss(results):
    (variants,) = programs_of(results, "Qwen-like", "train step").values()
    before, after = (variants[norms]["temp MiB"] / 1024 for norms in ("xla", "jaxnorm-default-loss"))
    gain = faster(change(variants, "jaxnorm-default-loss"))
    names = "Qwen-like, joint", "train step", f"{results['header']['classes']} classes, the loss too"
    memory = f"{after:.1f} GiB of temporaries in place of {before:.1f}"
    return [*linked(results, STEPS, *names), f"{gain}, {memory}", "-", scatter(variants)]


def of_bonsai(results, model):
    """Of a model as its authors wrote it, whose norms are Flax's or their own."""
    ways = {row["way"]: row for row in results["rows"] if row["model"] == model}
    gain, norms = (faster(ways[way]["faster %"]) for way in ("blocks", "norms"))
    names = linked(results, "models.md#models-of-bonsai", f"{BONSAI[model]} of bonsai, its blocks", "train step")
    return [*names, f"{gain}; its norms alone {norms}", "-", share(ways["own"], "step ms")]


def blocks(results):
    """A line for each model: what norms alone gain, and what blocks do."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in results["rows"]):
        own, norms, with_blocks = (row for row in results["rows"] if row["model"] == model)
        times = [f"{row['step ms']:.1f}" for row in (own, norms, with_blocks)]
        gains = [faster(row["faster %"]) for row in (norms, with_blocks)]
        lines.append([BONSAI[model], *times, *gains, share(own, "step ms"), with_blocks["native calls"]])
    columns = ["model", "ms", "norms", "blocks", "norms alone", "with blocks", "scatter %", "native calls of a step"]
    return [*about(results["header"]), *report.table(columns, lines)]


def programs_of(results, model="", program=""):
    """The rows by their norms, of each model and program whose names begin so."""
    programs = {}
    for row in results["rows"]:
        if row["model"].startswith(model) and row["program"].startswith(program):
            programs.setdefault((row["model"], row["program"]), {})[row["norms"]] = row
    return programs


def spread(percents):
    """The least change and the largest, in words."""
    return " to ".join(dict.fromkeys(faster(end(percents, default=None)) for end in (min, max)))


def faster(percent):
    """A change in words; a loss is bold."""
    if percent is None:
        return "-"
    if abs(percent) < 0.05:
        return "as fast"
    return f"{percent:.1f} % faster" if percent >= 0 else f"**{-percent:.1f} % slower**"


SUMMED = ("op", "shape", "M", "N")
ON_GPU = (*SUMMED, "us", "order us", "fill us", "% of copy", "XLA us", "x XLA", "temp MiB", "XLA temp MiB")
ON_CPU = (*SUMMED, "ms", "copy ms", "XLA ms", "x XLA")
BESIDE_CUDNN = ("op", "dtype", "M", "N", "us", "cuDNN us", "x cuDNN", "XLA us", "x XLA")
CHOICES = ("mode", "dtype", "rows", "us", "jax.numpy us", "x jax.numpy", "x sort")
LOOPS = ("sequences", "choice", "ms", "± us", "faster %")
IN_TWO_PROCESSES = ("variant", "attention", "flags", "ms", "arrays", "differ")
OLDER_STEPS = ("h100/float8", "h200/float8", "h200/float8-flax", "h200/float8-narrow")
FORWARD = ("h200/forward", "h200/forward-others")
NEW_MODELS = ("h100/models", "h100/joint", "h100/qwen")
TABLES = {
    "h200-headline": (headline, "h200/norms"),
    "h200-grid": (grid, "h200/norms"),
    "h200-models": (models, "h200/norms"),
    "cpu-headline": (headline, "cpu/norms"),
    "cpu": (cpu, "cpu/norms"),
    "promise": (promise, "h200/lookups"),
    "picture": (picture, "h200/lookups", "h100/models"),
    "whole-programs": (whole_programs, "h200/lookups", *NEW_MODELS[::2], "h100/blocks", "h200/decoding"),
    "steps": (functools.partial(steps, program="train step"), *NEW_MODELS),
    "forward": (steps, *FORWARD),
    "forward-float32": (steps, "h200/forward-float32"),
    "models": (wholes, *NEW_MODELS, *FORWARD, "h200/train"),
    "linear-loss": (wholes, "h200/linear-loss"),
    "decoding": (steps, "h200/decoding"),
    "blocks": (blocks, "h100/blocks"),
    "lookups": (wholes, "h200/lookups"),
    "cudnn": (functools.partial(chosen, columns=BESIDE_CUDNN), "h200/cudnn"),
    "h200-embedding": (functools.partial(chosen, columns=ON_GPU), "h200/embedding"),
    "h200-sampling": (functools.partial(chosen, columns=CHOICES), "h200/sampling"),
    "sampling": (functools.partial(chosen, columns=LOOPS), "h200/sampling-loop"),
    "reproducible": (functools.partial(chosen, columns=IN_TWO_PROCESSES), "h200/reproducible"),
    "cpu-embedding": (functools.partial(chosen, columns=ON_CPU), "cpu/embedding"),
    "float8-steps": (wholes, "h200/float8-step", *OLDER_STEPS),
    "float8-forward": (wholes, "h200/float8-forward"),
    "float8-accumulate": (wholes, "h200/accumulate"),
}
