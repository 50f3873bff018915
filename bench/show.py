"""Prints results files as the tables that their runs printed: `python -m bench show bench/results/h200.json`."""

from pathlib import Path

from bench import report


def add_arguments(parser):
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of results")


def main(args):
    for path in args.results:
        data = report.load(path)
        print(report.markdown(data.pop("header"), data.pop("rows"), data))
