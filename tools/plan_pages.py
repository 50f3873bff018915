"""Writes the pages of launch plans that the documentation embeds: `python -m tools.plan_pages`.

The CUDA kernels have to be built, and need no GPU. The pages are kept in the repository, as the documentation is built
without the kernels; a test says when they have to be written again.
"""

from pathlib import Path

from jaxnorm import _page, _request, info

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "plans"
# Every regime, in the order of length: the heads of attention, a vision transformer, Llama 3 8B, and long rows.
CALLS = {
    "heads": ("--op", "rms_norm", "--shape", "4x2048x32x128", "--dtype", "bfloat16"),
    "vit": ("--op", "layer_norm", "--shape", "64x577x1024", "--dtype", "bfloat16"),
    "llama": ("--op", "rms_norm", "--shape", "4x2048x4096", "--dtype", "bfloat16"),
    "cluster": ("--op", "rms_norm", "--shape", "2048x65536", "--dtype", "bfloat16"),
    "longest": ("--op", "rms_norm", "--shape", "256x1048576", "--dtype", "float32"),
}


def page(name: str) -> str:
    options, request = _request.parse(["--platform", "cuda", *CALLS[name]])
    return _page.page(info.call(options.op, request, options.platform), request)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in CALLS:
        (FOLDER / f"{name}.html").write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
