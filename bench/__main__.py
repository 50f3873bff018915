"""`python -m bench COMMAND`: each command is a module with `add_arguments(parser)` and `main(args)`."""

import argparse
import importlib
import sys

COMMANDS = {
    "gpu": "device time of the ops on an NVIDIA GPU, beside XLA's code and a copy",
    "cpu": "wall time of the ops on the CPU, beside XLA's code and a copy",
    "float8": "a training step with products of float8, beside bfloat16",
    "model": "the norms within a model's training step",
    "reproducible": "whether two processes train a language model to the same bits",
    "sampling": "choosing the next token, alone and in a loop on the device, beside jax.numpy",
    "tables": "write the results into README.md and docs/",
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """The arguments, with the command's function as `main`. No other command is imported: each needs other packages."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="The benchmarks of jaxnorm.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == chosen:
            module = importlib.import_module(f"bench.{name}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(main=module.main)
    return parser.parse_args(arguments)


def main() -> int:
    args = parse(sys.argv[1:])
    return int(args.main(args) or 0)


if __name__ == "__main__":
    sys.exit(main())
