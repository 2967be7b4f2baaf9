"""Answers to held-out problems of each evaluation: written by a run."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..types import Episode, Sample

# A file of JSON lines in the folder of a run.
HELD_OUT = "held_out.jsonl"


def lines(step: int, samples: Sequence[Sample], episodes: Sequence[Episode], name: str = "") -> bytes:
    """Write one line of JSON for each answer: step, set (its name, where it is not the first one), problem (its number
    among those of the set), prompt, target, response, reward, correct, tokens (sampled) and finish. `reward` and
    `correct` are null where they are not known. Several answers to a problem are neighbours."""
    numbers: dict[int, int] = {}  # of problems, by the identity of their samples
    for sample in samples:
        numbers.setdefault(id(sample), len(numbers))
    rows = (
        {
            "step": step,
            **({"set": name} if name else {}),
            "problem": numbers[id(sample)],
            "prompt": str(sample.prompt),
            "target": sample.target,
            "response": episode.text,
            "reward": episode.outcome,
            "correct": episode.info["correct"],
            "tokens": sum(episode.mask),
            "finish": episode.turns[-1].finish if episode.turns else episode.info.get("finish", ""),
        }
        for sample, episode in zip(samples, episodes, strict=True)
    )
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
