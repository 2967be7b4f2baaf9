"""The examination: probes of several rows, what they earn, and what that says."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, median
from typing import NamedTuple

from . import probes
from .calls import Case, Outcome, RewardProcess
from .findings import Finding, Severity

ROWS = 12  # rows that are probed: each takes some 80 calls
WRONG = 4  # targets of other rows that are tried as wrong answers to one
SLOW = 1.0  # seconds of a median call, above which rewards are slower than most rollouts of a small model
# Of the distance between wrong and right: an answer that is worth more than this is paid as right.
PAID = 0.75
ABOVE = 0.05
ORDERS = 3  # of a group
# The kinds of errors by what their text begins with.
ERRORS = {"no answer within": ("hangs", "hangs"), "its process ended": ("ends", "ends its process")}


@dataclass
class Examination:
    """What was seen of a reward.

    Args:
        right, wrong: mean rewards of right answers, in the form that earns most, and of other rows' answers.
        median_seconds, slowest: of calls that answered.
    """

    rows: int
    findings: list[Finding] = field(default_factory=list)
    calls: int = 0
    right: float | None = None
    wrong: float | None = None
    median_seconds: float = 0.0
    slowest: float = 0.0

    @property
    def has_fault(self) -> bool:
        """Whether a finding fails the examination."""
        return any(finding.severity == "fault" for finding in self.findings)


def examine(name: str, cases: Sequence[Case], *, limit: float = 10.0) -> Examination:
    """Examine a reward on rows of data.

    Args:
        name: `package.module:name`, or one of this library's rewards.
        cases: rows of the data it is for; the first `ROWS` are used, and need targets for most of what is tried.
        limit: seconds of a call.

    Raises:
        ValueError: there are fewer than two rows, or the reward cannot be called with them at all.
    """
    if len(cases) < 2:
        raise ValueError(f"an examination needs two rows or more, got {len(cases)}")
    with RewardProcess(name, limit) as process:
        return _Examiner(cases[:ROWS], process).run()


class Earned(NamedTuple):
    """What an answer to a row earned."""

    reward: float
    case: Case
    answer: str


class _Examiner:
    def __init__(self, cases: Sequence[Case], process: RewardProcess) -> None:
        self.cases, self.process = cases, process
        self.result = Examination(len(cases))
        self.seconds: list[float] = []
        self.errors: dict[str, Finding] = {}  # one of each kind of error
        self.targets = list(dict.fromkeys(case.target for case in cases if case.target))
        self.typical = 0.0  # what wrong answers earn

    def run(self) -> Examination:
        first = self.process.call(self.cases[0], [self.cases[0].target or "1"])
        if first.error:
            raise ValueError(f"the reward cannot be called with the first row: {first.error}")
        # First what right and wrong answers earn: all others are compared with these. Last what may end the process.
        self.try_answers()
        self.try_constants()
        if self._separates():
            self.try_unearned()
        self.leave_out_target()
        self.repeat()
        self.reorder()
        self.try_hostile()

        result = self.result
        result.findings += self.errors.values()
        if self.seconds:
            result.median_seconds, result.slowest = median(self.seconds), max(self.seconds)
            if result.median_seconds > SLOW:
                self.add("note", "slow", f"a call takes {result.median_seconds:.2f} s", self.cases[0], ("1",))
        result.findings.sort(key=lambda finding: ("fault", "doubt", "note").index(finding.severity))
        return result

    def score(self, case: Case, responses: Sequence[str], probe: str, target: str | None = None) -> Outcome:
        """Call the reward; an error is a finding, one of each kind."""
        outcome = self.process.call(case, responses, target)
        self.result.calls += 1
        if outcome.error:
            kind, verb = next((ERRORS[start] for start in ERRORS if outcome.error.startswith(start)), ("raises",) * 2)
            # One of each exception: hostile answers tend to raise the same.
            text = f"{verb} on {probe}: {outcome.error}"
            finding = Finding("fault", kind, text, case, tuple(responses), target)
            self.errors.setdefault(outcome.error.split(":")[0], finding)
        else:
            self.seconds.append(outcome.seconds)
        return outcome

    def add(
        self, severity: Severity, kind: str, text: str, case: Case, responses: Sequence[str], claim: str = ""
    ) -> None:
        """Add a finding."""
        target = "" if kind == "target" else None
        self.result.findings.append(Finding(severity, kind, text, case, tuple(responses), target, claim))

    def earn(self, answers: Callable[[Case], Mapping[str, str]], probe: str = "{}") -> dict[str, list[Earned]]:
        """What the answers to each row earn, by their names; without those that are not scored."""
        earned: dict[str, list[Earned]] = defaultdict(list)
        for case in self.cases:
            for name, answer in answers(case).items():
                reward = self.score(case, [answer], probe.format(name)).reward
                if reward is not None:
                    earned[name].append(Earned(reward, case, answer))
        return earned

    def try_answers(self) -> None:
        """What right and wrong answers earn, and forms of the right one that earn nothing."""
        forms = self.earn(lambda case: probes.right_forms(case.target) if case.target else {}, "a right answer ({})")
        best = max(forms, key=lambda form: _mean(forms[form]), default="plain")

        def others(case: Case) -> dict[str, str]:
            """Wrong answers are plausible ones, in the form in which a right one would be paid."""
            targets = [target for target in self.targets if target != case.target]
            drawn = random.Random(case.prompt).sample(targets, min(WRONG, len(targets)))
            return {f"an answer of another row, {target}": probes.right_forms(target)[best] for target in drawn}

        wrongs = [earned for rows in self.earn(others).values() for earned in rows]
        right = self.result.right = _mean(forms[best]) if forms else None
        wrong = self.result.wrong = _mean(wrongs) if wrongs else None
        # The median: partial credit for a few lucky ones must not hide what most earn.
        self.typical = median(earned.reward for earned in wrongs) if wrongs else 0.0
        if right is not None and wrong is not None and not self._separates():
            text = f"right answers earn {right:.3f} on average and answers of other rows {wrong:.3f}: it does not "
            text += "tell them apart, or expects a form that was not tried"
            severity: Severity = "fault" if right < wrong else "doubt"
            self.add(severity, "blind", text, self.cases[0], (self.cases[0].target or "",))
        for form, rows in forms.items():
            missed = [earned for earned in rows if self._separates() and not self._is_paid(earned.reward)]
            # In a few rows the form may change what the answer is.
            if len(missed) > len(self.cases) / 2:
                reward, case, answer = missed[0]
                text = f"a right answer in the form {form!r} earns {reward:.3f}: {answer[-60:]!r}"
                self.add("note", "form", text, case, (answer,), f"rewards[0] > {reward}")

    def try_constants(self) -> None:
        """Answers that are the same whatever is asked."""
        right, wrong = self.result.right, self.result.wrong
        distance = 1.0 if right is None or wrong is None else max(right - wrong, 0.0) or 1.0

        def constants(case: Case) -> dict[str, str]:
            """The target of some row may be a constant by itself."""
            known = [text for text in probes.CONSTANTS if case.target and text.strip() and case.target in text]
            return {f"the constant answer {text!r}": text for text in probes.CONSTANTS if text not in known}

        for name, rows in self.earn(constants).items():
            average = _mean(rows)
            most, case, constant = max(rows, key=lambda earned: earned.reward)
            text = f"{name} earns {average:.3f} on average, "
            if self._separates() and self._is_paid(average):
                self.add("fault", "constant", text + "as right ones do", case, (constant,), f"rewards[0] < {most}")
            elif average > self.typical + ABOVE * distance:
                text += f"wrong answers {self.typical:.3f}"
                self.add("doubt", "constant", text, case, (constant,), f"rewards[0] < {most}")

    def try_unearned(self) -> None:
        """Answers that most rows pay as right, and should not: lists, copies of the prompt, orders to a judge."""
        for kind, answers in probes.UNEARNED.items():
            for name, rows in self.earn(partial(self._unearned, answers)).items():
                paid = [earned for earned in rows if self._is_paid(earned.reward)]
                # One row may be right by accident.
                if len(paid) > max(1, len(rows) / 4):
                    reward, case, answer = paid[0]
                    text = f"{name} earns what a right one does in {len(paid)} of {len(rows)} rows: {answer[:80]!r}"
                    severity: Severity = "fault" if kind == "injection" else "doubt"
                    self.add(severity, kind, text, case, (answer,), f"rewards[0] < {reward}")

    def leave_out_target(self) -> None:
        """Rows without a target: nothing is known, and a number says otherwise."""
        case = self.cases[0]
        for name, response in (("an answer", "12"), ("an empty answer", "")) if case.target else ():
            self.result.calls += 1
            reward = self.process.call(case, [response], "").reward
            if reward is not None:
                severity: Severity = "fault" if self._separates() and self._is_paid(reward) else "doubt"
                text = f"{name} to a row with an empty target earns {reward:.3f}, and not None (unscored)"
                self.add(severity, "target", text, case, (response,), "rewards[0] is None")

    def repeat(self) -> None:
        """The same call again: a reward that samples or counts differs in nearly all of three."""
        for case in self.cases[:4]:
            answers = list(probes.right_forms(case.target or "1").values())[:3]
            outcomes = [self.score(case, answers, "the same answers again") for _ in range(3)]
            values = {str(outcome.rewards) for outcome in outcomes if not outcome.error}
            if len(values) > 1:
                text = f"the same answers earn different rewards: {', '.join(sorted(values))}"
                self.add("doubt", "random", text, case, answers)
                return

    def reorder(self) -> None:
        """A group in other orders, and its members alone."""
        case = self.cases[0]
        group = list(dict.fromkeys([*probes.right_forms(case.target or "1").values(), *self._others(case)[:3]]))
        plain = self.score(case, group, "a group").rewards
        if not plain:
            return
        draw = random.Random(0)
        for _ in range(ORDERS):
            order = draw.sample(range(len(group)), len(group))
            shuffled = [group[number] for number in order]
            moved = self.score(case, shuffled, "a group in another order").rewards
            if moved and moved != tuple(plain[number] for number in order):
                self.add("fault", "order", "rewards of a group depend on the order of its answers", case, shuffled)
                return
        # That a reward compares the answers of a group may be meant.
        if tuple(self.score(case, [answer], "one answer").reward for answer in group) != plain:
            self.add("note", "group", "answers earn something else in a group than alone", case, group)

    def try_hostile(self) -> None:
        """Answers that take long or confuse parsers: errors and time-outs are found by `score`."""
        for name, rows in self.earn(lambda case: probes.hostile(case) if case in self.cases[:2] else {}).items():
            for reward, case, answer in rows:
                is_paid = self._separates() and self._is_paid(reward)
                if is_paid and not (case.target and case.target in answer):
                    text = f"{name} earns {reward:.3f}, as right answers do"
                    self.add("fault", "hostile", text, case, (answer,), f"rewards[0] < {reward}")

    def _unearned(self, answers: Callable[[Case, list[str]], dict[str, str]], case: Case) -> dict[str, str]:
        others = self._others(case)
        return answers(case, others) if case.target and others else {}

    def _others(self, case: Case) -> list[str]:
        return [target for target in self.targets if target != case.target][:6]

    def _separates(self) -> bool:
        right, wrong = self.result.right, self.result.wrong
        return right is not None and wrong is not None and right - wrong > 0.1 * max(abs(right), abs(wrong), 1e-6)

    def _is_paid(self, reward: float) -> bool:
        right, wrong = self.result.right or 0.0, self.result.wrong or 0.0
        return reward >= wrong + PAID * (right - wrong)


def _mean(rows: Sequence[Earned]) -> float:
    return mean(earned.reward for earned in rows)
