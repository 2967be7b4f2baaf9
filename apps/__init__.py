import sys

from forge.recipes.signals import end_at_signals

if sys.argv[:1] == ["-m"]:  # a program of this package is about to import for seconds
    end_at_signals()
