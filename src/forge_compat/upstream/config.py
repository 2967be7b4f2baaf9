"""`forge.util.config` of torchforge: the decorator of a program that takes `--config FILE`."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from forge_compat.torchforge_files import Settings, read_upstream


def parse(main: Callable[[Settings], object]) -> Callable[[], NoReturn]:
    """Make a function of a configuration a program: `program --config FILE section.key=value ~section.key`.

    The function gets the file's values, with interpolations resolved: `cfg.trainer.training.steps`, `cfg.get("x")`,
    `**cfg.dataset`. Bad input ends the program with one line.
    """

    @functools.wraps(main)
    def program() -> NoReturn:
        parser = argparse.ArgumentParser(description=main.__doc__)
        parser.add_argument("--config", type=Path, required=True, help="YAML file")
        # Without dashes, as torchforge has them; argparse reports one that has.
        parser.add_argument("overrides", nargs="*", help="section.key=value")
        args = parser.parse_args()
        try:
            values = read_upstream(args.config, args.overrides)
        except (ValueError, OSError) as error:
            raise SystemExit(f"error: {error}") from None
        sys.exit(main(Settings(values)))  # type: ignore[arg-type]  # its value is the exit code, as torchforge has it

    return program
