"""The type of what commands are added to."""

import argparse
from typing import TypeAlias

# argparse has no public name for the class.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
