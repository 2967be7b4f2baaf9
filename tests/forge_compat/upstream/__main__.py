"""The table of upstream's tests that pass here: `python -m tests.forge_compat.upstream [FILE ...]`.

FORGE_TORCHFORGE_SOURCE names a checkout of the repository.
"""

import sys
from collections import Counter

from .run import obstacle, outcomes
from .suites import SUITES, Suite


def print_suite(suite: Suite, words: list[str]) -> bool:
    """Print the table of a suite; return whether every failure is a stated difference."""
    print(f"\n{suite.name}")
    if obstruction := obstacle(suite):
        print(f"  not run: {obstruction}")
        return True
    is_as_stated = True
    for file in suite.files:
        if words and not any(word in file for word in words):
            continue
        results = list(outcomes(suite, file))
        counts = Counter(outcome.status for outcome in results)
        print(f"  {file:55} {', '.join(f'{count} {status}' for status, count in sorted(counts.items()))}", flush=True)
        for outcome in results:
            reason = suite.reason(outcome.name) if outcome.status == "failed" else None
            if outcome.status != "passed":
                print(f"    {outcome.status} {outcome.test}: {reason or outcome.message}", flush=True)
            is_as_stated &= outcome.status != "failed" or reason is not None
    if not words:
        for file, reason in suite.outside.items():
            print(f"  {file:55} not run: {reason}")
    return is_as_stated


if __name__ == "__main__":
    sys.exit(0 if all([print_suite(suite, sys.argv[1:]) for suite in SUITES]) else 1)
