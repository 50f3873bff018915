"""The table of whole models, see `bench.tables`."""

from bench import report, table_parts

# What a user gets who asks for nothing: the norms alone, and what takes the neighbours in.
DEFAULTS = ("jaxnorm-default-norm", "jaxnorm-default")


def steps(*runs):
    """What the norms are of a whole step of a model, and what jaxnorm changes of it, in percent: gains first."""
    lines = []
    for results in runs:
        programs = {}
        for row in results["rows"]:
            name = row["program"] + (", separate products" if results["header"].get("products") == "separate" else "")
            programs.setdefault((row["model"], name), {})[row["norms"]] = row
        lines += [step(*names, variants) for names, variants in programs.items()]
    lines.sort(key=lambda line: line[0], reverse=True)
    columns = ["program", "XLA ms", "norms %", "the norms", "with their neighbours", "scatter %"]
    headers = [line for results in runs for line in table_parts.about(results["header"])]
    return [*headers, *report.table(columns, [cells for _, cells in lines])]


def step(model, program, variants):
    """(the best change in percent, the cells of the line) of one program of a model."""
    xla = variants["jnp"]
    changes = {norms: change(variants, norms) for norms in DEFAULTS if norms in variants}
    cells = [f"{xla['ms']:.2f}", f"{xla['norms us'] / xla['ms'] / 10:.1f}"]
    cells += [faster(changes.get(norms)) for norms in DEFAULTS]
    return max(changes.values()), [f"{model}, {program}", *cells, scatter(variants)]


def change(variants, norms):
    """In percent of a program, of paired runs: by what it takes longer than the one without norms beside it."""
    xla = variants["jnp"]
    return (xla["norms us"] - variants[norms]["norms us"]) / xla["ms"] / 10


def scatter(*programs):
    """Half the interquartile range of XLA's program in percent of it, the largest of several programs."""
    return f"±{max(variants['jnp']['± us'] / variants['jnp']['ms'] / 10 for variants in programs):.1f}"


STEPS, OTHERS = "models.md#in-percent-of-a-step", "models.md#other-models"
LOSS = "softmax.md#a-model-with-a-large-vocabulary"


def headline(default, diffusion, loss):
    """A few whole programs, each with a link from README.md to the page that has its table."""
    (device,) = {results["header"]["device"] for results in (default, diffusion, loss)}
    lines = [
        trained(default, "ViT-like", STEPS),
        trained(diffusion, "DiT-like", OTHERS),
        trained(default, "Llama-like", STEPS),
        with_loss(loss),
        decoded(default),
    ]
    columns = [f"{device}, whole programs", "against XLA's code", "scatter %"]
    return report.table(columns, [[f"[{name}](docs/benchmarks/{page})", *cells] for name, page, *cells in lines])


def trained(results, model, page):
    variants = variants_of(results, model, "train step")
    return f"{model}, training", page, faster(change(variants, DEFAULTS[1])), scatter(variants)


def with_loss(results):
    variants = variants_of(results, "Llama-like", "train step")
    before, after = (variants[norms]["temp MiB"] / 1024 for norms in ("jnp", "jaxnorm-loss"))
    gain = f"{faster(change(variants, 'jaxnorm-loss'))}, {after:.1f} GiB of temporaries in place of {before:.1f}"
    classes = results["header"]["classes"]
    return f"Llama-like, training, {classes} classes, only the loss replaced", LOSS, gain, scatter(variants)


def decoded(results):
    names = dict.fromkeys((row["model"], row["program"]) for row in results["rows"] if "decode" in row["model"])
    programs = [variants_of(results, *name) for name in names]
    changes = [change(variants, DEFAULTS[1]) for variants in programs]
    return "Llama-like, decoding", STEPS, f"{faster(min(changes))} to {faster(max(changes))}", scatter(*programs)


def variants_of(results, model, program):
    """The rows of a program, by their norms."""
    rows = [row for row in results["rows"] if (row["model"], row["program"]) == (model, program)]
    return {row["norms"]: row for row in rows}


def faster(percent):
    """A change in words; a loss is bold."""
    if percent is None:
        return "-"
    if abs(percent) < 0.05:
        return "as fast"
    return f"{percent:.1f} % faster" if percent >= 0 else f"**{-percent:.1f} % slower**"
