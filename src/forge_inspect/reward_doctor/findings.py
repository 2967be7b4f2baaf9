"""Findings about a reward, and the test that shows each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .calls import Case

# A fault fails the examination; a doubt may be meant; a note is for reading.
Severity = Literal["fault", "doubt", "note"]


@dataclass(frozen=True)
class Finding:
    """Something that a reward does.

    Args:
        kind: a word, such as "constant" or "raises".
        text: one line: what happens, with figures.
        case, responses: a call that shows it.
        target: of that call, where it is not the case's.
        expected: the assertion that fails today, an expression over `rewards`; "" where the call itself fails.
    """

    severity: Severity
    kind: str
    text: str
    case: Case
    responses: tuple[str, ...]
    target: str | None = None
    expected: str = ""

    @property
    def line(self) -> str:
        """The finding in one line."""
        return f"{self.severity}: {self.text}"


def test_file(name: str, findings: Sequence[Finding], limit: float) -> str:
    """A file for pytest with a test for each finding, which fails as long as the reward does it."""
    lines = [
        f'"""What `forge doctor reward {name}` found. Each test fails as long as the reward does it."""',
        "",
        "from forge_inspect.reward_doctor.calls import Case, RewardProcess",
        "",
        "",
        "def rewards_of(case, responses, target=None):",
        f"    with RewardProcess({name!r}, limit={limit!r}) as reward:",
        "        outcome = reward.call(case, responses, target)",
        "    assert not outcome.error, outcome.error",
        "    return outcome.rewards",
    ]
    # Names of tests are numbered by kind, so that those of other kinds keep theirs when one is mended.
    counts: dict[str, int] = {}
    for finding in findings:
        counts[finding.kind] = counts.get(finding.kind, 0) + 1
        case = f"Case({finding.case.prompt!r}, {finding.case.target!r}, {dict(finding.case.row)!r})"
        lines += [
            "",
            "",
            f"def test_{finding.kind}_{counts[finding.kind]}():",
            f"    # {finding.text}",
            f"    rewards = rewards_of({case}, {_spelled(finding.responses)}, {finding.target!r})",
            f"    assert {finding.expected or 'rewards'}",
        ]
    return "\n".join(lines) + "\n"


def _spelled(responses: Sequence[str]) -> str:
    """The responses as an expression; a long one is a repeated piece, as its probe made it."""
    texts = []
    for response in responses:
        piece = response[: len(response) // 1000] if len(response) > 5000 else ""
        is_repeated = bool(piece) and piece * (len(response) // len(piece)) == response
        texts.append(f"{piece!r} * {len(response) // len(piece)}" if is_repeated else repr(response))
    return f"[{', '.join(texts)}]"
