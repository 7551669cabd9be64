"""``python -m tests.explore --seconds N``: search for so long; exit 1 with a history when a rule breaks."""

import argparse
import sys

from tests.explore.search import Found, explore


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=300.0)
    try:
        for level in explore(arguments.parse_args().seconds):
            print(level, flush=True)
    except Found as found:
        print(f"BROKEN: {found}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
