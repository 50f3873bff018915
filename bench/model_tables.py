"""The table of whole models, see `bench.tables`."""

import functools

from bench import report, table_parts

# What a user gets who asks for nothing: the norms alone, and what takes the neighbours in.
DEFAULTS = ("jaxnorm-default-norm", "jaxnorm-default")


def steps(*runs, decoding=False):
    """What the norms are of a whole step of a model, and what jaxnorm changes of it, in percent: gains first.

    A column of which nothing was measured is left out. `decoding`: of models that decode, or of the others.
    """
    lines = []
    for results in runs:
        more = ["separate products"] if results["header"].get("products") == "separate" else []
        lines += [
            step([*names, *more], variants)
            for names, variants in programs_of(results).items()
            if decoding == (", decode" in names[0])
        ]
    lines.sort(key=lambda line: line[0], reverse=True)
    changes = ["the norms", "with their neighbours", "against Flax's norms", "against XLA's in float32"]
    columns = ["program", "XLA ms", "norms %", *changes, "scatter %"]
    cells = [column for column in zip(columns, *(cells for _, cells in lines), strict=True) if {*column[1:]} != {"-"}]
    columns, *lines = map(list, zip(*cells, strict=True))
    headers = [line for results in runs for line in table_parts.about(results["header"])]
    return [*headers, *report.table(columns, lines)]


def step(names, variants):
    """(the best change in percent, the cells of the line) of one program of a model."""
    xla = variants["jnp"]
    changes = {norms: change(variants, norms) for norms in DEFAULTS if norms in variants}
    cells = [f"{xla['ms']:.2f}", f"{xla['norms us'] / xla['ms'] / 10:.1f}"]
    cells += [faster(changes.get(norms)) for norms in DEFAULTS]
    cells += [against(of, variants) for of in ("flax", "jnp-float32")]
    return max(changes.values()), [", ".join(names), *cells, scatter(variants)]


def change(variants, norms, of="jnp"):
    """In percent of a program, of paired runs: by what it takes longer than the one without norms beside it."""
    xla = variants[of]
    return (xla["norms us"] - variants[norms]["norms us"]) / xla["ms"] / 10


def against(of, *programs):
    return spread([change(variants, DEFAULTS[1], of) for variants in programs if of in variants])


def scatter(*programs):
    """Half the interquartile range of XLA's program in percent of it, the largest of several programs."""
    return share(max((variants["jnp"] for variants in programs), key=lambda row: row["± us"] / row["ms"]), "ms")


def share(row, time):
    return f"±{row['± us'] / row[time] / 10:.1f}"


decoding = functools.partial(steps, decoding=True)
STEPS, DECODING = "models.md#in-percent-of-a-step", "models.md#decoding"
COMPARED = ("U-Net", "Llama-like, packed")  # with Flax's norms, too
BONSAI = {"vae": "VAE", "gemma3": "Gemma 3", "qwen3": "Qwen3", "dit": "DiT", "vit": "ViT"}


def headline(compared, joint, qwen, blocks, decoded):
    """A few whole programs, each with a link from README.md to the page that has its table."""
    lines = [
        *(line(compared, model, "train step") for model in COMPARED),
        line(joint, "Llama-like, joint", "train step"),
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
    return [f"[{', '.join(filter(None, names))}](docs/benchmarks/{page})", gpu]


def with_loss(results):
    (variants,) = programs_of(results, "Qwen-like", "train step").values()
    before, after = (variants[norms]["temp MiB"] / 1024 for norms in ("jnp", "jaxnorm-default-loss"))
    gain = (
        f"{faster(change(variants, 'jaxnorm-default-loss'))}, {after:.1f} GiB of temporaries in place of {before:.1f}"
    )
    names = "Qwen-like, joint", "train step", f"{results['header']['classes']} classes, the loss too"
    return [*linked(results, STEPS, *names), gain, "-", scatter(variants)]


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
    return [*table_parts.about(results["header"]), *report.table(columns, lines)]


def programs_of(results, model="", program=""):
    """The rows by their norms, of each model and program whose names begin so."""
    programs = {}
    for row in results["rows"]:
        if row["model"].startswith(model) and row["program"].startswith(program):
            programs.setdefault((row["model"], row["program"]), {})[row["norms"]] = row
    return programs


def spread(percents):
    """The least change and the largest, in words."""
    words = [faster(end(percents, default=None)) for end in (min, max)]
    return " to ".join(dict.fromkeys(words))


def faster(percent):
    """A change in words; a loss is bold."""
    if percent is None:
        return "-"
    if abs(percent) < 0.05:
        return "as fast"
    return f"{percent:.1f} % faster" if percent >= 0 else f"**{-percent:.1f} % slower**"
