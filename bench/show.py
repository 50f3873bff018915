"""Prints results files as the tables that their runs printed: `python -m bench show bench/results/h200.json`."""

from pathlib import Path

from bench import report, targets


def add_arguments(parser):
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of results")


def main(args):
    for path in args.results:
        data = report.load(path)
        header, rows = data.pop("header"), data.pop("rows")
        print(report.markdown(header, rows, targets.below(header, rows) | data))
