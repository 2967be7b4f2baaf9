"""The examination of a reward: answers to several rows of data are scored, and odd scores become findings."""

import argparse
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from statistics import mean, median
from typing import Literal, NamedTuple

from forge.data.columns import plain_columns, with_ground_truth
from forge.data.files import open_rows
from forge.data.prompts import PromptFormat
from forge.rewards.rules import load_reward

from . import probes
from .calls import Case, Outcome, RewardProcess

ROWS = 12  # rows that are tried: each takes some 80 calls
WRONG = 4  # targets of other rows that are tried as wrong answers to one
SLOW = 1.0  # seconds of a median call, above which rewards are slower than most rollouts of a small model
# On a scale where the mean wrong answer earns 0 and the mean right one 1: from PAID on an answer is paid as right, and
# one that is ABOVE the median wrong answer earns something.
PAID = 0.75
ABOVE = 0.05
# Kind and verb of the finding for an error, by the start of the error's text.
ERRORS = {"no answer within": ("hangs", "hangs"), "its process ended": ("ends", "ends its process")}
# A fault fails the examination; a doubt may be intended; a note is for information.
Severity = Literal["fault", "doubt", "note"]


class Finding(NamedTuple):
    """Suspicious behavior of a reward: `kind` is a word such as "constant" or "raises", `text` describes it."""

    severity: Severity
    kind: str
    text: str

    @property
    def line(self) -> str:
        """Return the finding in one line."""
        return f"{self.severity}: {self.text}"


@dataclass
class Examination:
    """Result of the examination of a reward: its findings and measurements.

    Args:
        rows: number of rows that were tried.
        findings: the most severe first.
        calls: number of calls of the reward.
        right: mean reward of right answers, in the form that earns most; None if none was scored.
        wrong: mean reward of the answers of other rows, in the same form; None if none was scored.
        seconds: that each call without an error took.
    """

    rows: int
    findings: list[Finding] = field(default_factory=list)
    calls: int = 0
    right: float | None = None
    wrong: float | None = None
    seconds: list[float] = field(default_factory=list)


def examine_reward(args: argparse.Namespace) -> None:
    """Examine a reward and print the findings, for the command `forge doctor reward`; exit with 1 if one is a fault."""
    if not args.reward or not args.data:
        raise ValueError("name a reward and rows: forge doctor reward package.module:name --data FILE")
    target_field = None if args.target_field in ("null", "none", "") else args.target_field
    form = PromptFormat(None, "{question}", target_field, args.prompt_field, args.target_pattern)
    cases: list[Case] = []
    load_reward(args.reward)  # a wrong name is an error in one line here, and would be a traceback in its process
    for row in islice(map(with_ground_truth, open_rows(args.data, split="train")), ROWS):
        prompt, target = form.render(row)
        cases.append(Case(prompt, target or None, plain_columns(row, None, [])))

    result = examine(args.reward, cases, limit=args.timeout)
    right, wrong = ("unknown" if value is None else f"{value:.3f}" for value in (result.right, result.wrong))
    print(f"{result.calls} calls on {result.rows} rows: right answers earn {right}, answers of other rows {wrong};")
    if result.seconds:
        print(f"a call takes {1000 * median(result.seconds):.1f} ms, the slowest {max(result.seconds):.2f} s")
    print("\n".join(finding.line for finding in result.findings) or "nothing was found")
    if any(finding.severity == "fault" for finding in result.findings):
        raise SystemExit(1)


def examine(name: str, cases: Sequence[Case], *, limit: float = 10.0) -> Examination:
    """Examine a reward on rows of data.

    It scores right answers in several forms, answers of other rows, and answers that should earn nothing; then the same
    answers again, in another order, and without a target; last answers that may make it hang or crash.

    Args:
        name: `package.module:name`, or the name of one of this library's rewards.
        cases: rows of the data that the reward is for; the first `ROWS` are used. Most trials need their targets.
        limit: seconds that a call may take.

    Raises:
        ValueError: there are fewer than two rows, or the reward cannot be called with the first one.
    """
    if len(cases) < 2:
        raise ValueError(f"forge doctor reward needs at least two rows, got {len(cases)}")
    with closing(RewardProcess(name, limit)) as process:
        return _Examiner(cases[:ROWS], process).run()


class Earned(NamedTuple):
    """An answer to a row, and the reward that it earned."""

    reward: float
    answer: str


class _Examiner:
    def __init__(self, cases: Sequence[Case], process: RewardProcess) -> None:
        self.cases, self.process = cases, process
        self.result = Examination(len(cases))
        self.errors: dict[str, Finding] = {}  # the first of each kind of error
        self.targets = list(dict.fromkeys(case.target for case in cases if case.target))
        self.typical = 0.0  # median reward of wrong answers

    def run(self) -> Examination:
        first = self.process.call(self.cases[0], [self.cases[0].target or "1"])
        if first.error:
            raise ValueError(f"the reward cannot be called with the first row: {first.error}")

        # What right and wrong answers earn: all other rewards are compared with these.
        self.try_answers()

        # Answers that should earn no more than wrong ones.
        self.try_constants()
        self.try_unearned()

        # Calls whose rewards should be the same, or none.
        self.leave_out_target()
        self.repeat()
        self.reorder()

        # Last, as the process may not survive it.
        self.try_hostile()

        if self.result.seconds and (median_seconds := median(self.result.seconds)) > SLOW:
            self.add("note", "slow", f"a call takes {median_seconds:.2f} s")
        self.result.findings += self.errors.values()
        self.result.findings.sort(key=lambda finding: ("fault", "doubt", "note").index(finding.severity))

        return self.result

    def score(self, case: Case, responses: Sequence[str], probe: str, target: str | None = None) -> Outcome:
        """Call the reward and count the call; an error becomes a finding, one of each kind.

        Args:
            probe: names the answers in the finding.
            target: replaces the target of the case, unless it is None.
        """
        outcome = self.process.call(case, responses, target)
        self.result.calls += 1
        if not outcome.error:
            self.result.seconds.append(outcome.seconds)
            return outcome

        kind, verb = next((ERRORS[start] for start in ERRORS if outcome.error.startswith(start)), ("raises", "raises"))
        # One of each exception, which is named before the colon: hostile answers tend to raise the same.
        finding = Finding("fault", kind, f"{verb} on {probe}: {outcome.error}")
        self.errors.setdefault(outcome.error.split(":")[0], finding)
        return outcome

    def add(self, severity: Severity, kind: str, text: str) -> None:
        """Add a finding about the reward to the examination."""
        self.result.findings.append(Finding(severity, kind, text))

    def earn(self, answers: Callable[[Case], Mapping[str, str]], probe: str = "{}") -> dict[str, list[Earned]]:
        """Score answers to each row, and return the rewards of all rows by the name of the answer.

        Answers that are not scored are left out.

        Args:
            answers: returns the answers to a row, by name.
            probe: how a finding about an error calls the answer; "{}" stands for its name.
        """
        earned: dict[str, list[Earned]] = defaultdict(list)
        for case in self.cases:
            for name, answer in answers(case).items():
                reward = self.score(case, [answer], probe.format(name)).reward
                if reward is not None:
                    earned[name].append(Earned(reward, answer))
        return earned

    def try_answers(self) -> None:
        """Measure the rewards of right and wrong answers; add a finding if they are equal, or if a form of the right
        answer gets none."""
        forms = self.earn(lambda case: probes.right_forms(case.target) if case.target else {}, "a right answer ({})")
        best = max(forms, key=lambda form: _mean_score(forms[form]), default="plain")

        def wrong_answers(case: Case) -> dict[str, str]:
            # Plausible ones: targets of other rows, in the form in which a right answer is paid.
            targets = [target for target in self.targets if target != case.target]
            drawn = random.Random(case.prompt).sample(targets, min(WRONG, len(targets)))
            return {f"an answer of another row, {target}": probes.right_forms(target)[best] for target in drawn}

        wrongs = [earned for rows in self.earn(wrong_answers).values() for earned in rows]
        right = self.result.right = _mean_score(forms[best]) if forms else None
        wrong = self.result.wrong = _mean_score(wrongs) if wrongs else None

        if forms == {} and self.targets:
            self.add(
                "fault", "unscored", "no right answer is scored, in any form: it returns None or NaN, so nothing trains"
            )

        # The median: partial credit for a few lucky ones must not hide what most earn.
        self.typical = median(earned.reward for earned in wrongs) if wrongs else 0.0
        if right is not None and wrong is not None and not self._separates_answers():
            self.add(
                "fault" if right < wrong else "doubt",
                "blind",
                f"right answers earn {right:.3f} on average and answers of other rows {wrong:.3f}: it does not tell "
                "them apart, or expects a form that was not tried",
            )

        if not self._separates_answers():
            return
        for form, rows in forms.items():
            missed = [earned for earned in rows if not self._is_paid(earned.reward)]
            # In a few rows the form may change what the answer is.
            if len(missed) > len(self.cases) / 2:
                reward, answer = missed[0]
                self.add("note", "form", f"a right answer in the form {form!r} earns {reward:.3f}: {answer[-60:]!r}")

    def try_constants(self) -> None:
        """Find constant answers, independent of the prompt, that get a reward."""
        right, wrong = self.result.right, self.result.wrong
        distance = 1.0 if right is None or wrong is None else max(right - wrong, 0.0) or 1.0

        def constant_answers(case: Case) -> dict[str, str]:
            # Those that contain this row's target may rightly earn something.
            known = [text for text in probes.CONSTANTS if case.target and text.strip() and case.target in text]
            return {f"the constant answer {text!r}": text for text in probes.CONSTANTS if text not in known}

        for name, rows in self.earn(constant_answers).items():
            average = _mean_score(rows)
            text = f"{name} earns {average:.3f} on average, "
            if self._is_paid(average):
                self.add("fault", "constant", text + "as right ones do")
            elif average > self.typical + ABOVE * distance:
                self.add("doubt", "constant", text + f"wrong answers {self.typical:.3f}")

    def try_unearned(self) -> None:
        """Find wrong answers that get the reward of a right one in many rows: lists, copies of the prompt, orders to a
        judge."""
        for kind in probes.UNEARNED:

            def unearned_answers(case: Case, kind: str = kind) -> dict[str, str]:
                others = self._other_answers(case)
                return probes.make_unearned(case, others)[kind] if case.target and others else {}

            for name, rows in self.earn(unearned_answers).items():
                paid = [earned for earned in rows if self._is_paid(earned.reward)]
                # In one row, or a quarter of them, it may be right by accident.
                if len(paid) > max(1, len(rows) / 4):
                    answer = paid[0].answer
                    text = f"{name} earns what a right one does in {len(paid)} of {len(rows)} rows: {answer[:80]!r}"
                    self.add("fault" if kind == "injection" else "doubt", kind, text)

    def leave_out_target(self) -> None:
        """Add a finding if a row with an empty target is scored, although nothing is known about its answers."""
        case = self.cases[0]
        answers = (("an answer", "12"), ("an empty answer", "")) if case.target else ()
        for name, response in answers:
            # Not by `score`: to raise is not a fault here.
            self.result.calls += 1
            reward = self.process.call(case, [response], "").reward
            if reward is not None:
                text = f"{name} to a row with an empty target earns {reward:.3f}, and not None (unscored)"
                self.add("fault" if self._is_paid(reward) else "doubt", "target", text)

    def repeat(self) -> None:
        """Add a finding if equal answers get different rewards in three calls, as from a reward that samples."""
        for case in self.cases[:4]:
            answers = list(probes.right_forms(case.target or "1").values())[:3]
            outcomes = [self.score(case, answers, "the same answers again") for _ in range(3)]
            values = {str(outcome.rewards) for outcome in outcomes if not outcome.error}
            if len(values) > 1:
                self.add("doubt", "random", f"the same answers earn different rewards: {', '.join(sorted(values))}")
                return

    def reorder(self) -> None:
        """Add a finding if rewards depend on the order of a group's answers, or on whether an answer is in a group."""
        case = self.cases[0]
        group = list(dict.fromkeys([*probes.right_forms(case.target or "1").values(), *self._other_answers(case)[:3]]))
        rewards = self.score(case, group, "a group").rewards
        if not rewards:
            return
        reversed_rewards = self.score(case, group[::-1], "a group in another order").rewards
        if reversed_rewards and reversed_rewards != rewards[::-1]:
            self.add("fault", "order", "rewards of a group depend on the order of its answers")
        # That a reward compares the answers of a group may be intended.
        elif tuple(self.score(case, [answer], "one answer").reward for answer in group) != rewards:
            self.add("note", "group", "answers earn something else in a group than one at a time")

    def try_hostile(self) -> None:
        """Find hostile answers that get a reward; hangs and exceptions are found by `score`."""
        for case in self.cases[:2]:
            for name, answer in probes.make_hostile(case).items():
                reward = self.score(case, [answer], name).reward
                is_paid = reward is not None and self._is_paid(reward)
                if is_paid and not (case.target and case.target in answer):
                    self.add("fault", "hostile", f"{name} earns {reward:.3f}, as right answers do")

    def _other_answers(self, case: Case) -> list[str]:
        return [target for target in self.targets if target != case.target][:6]

    def _separates_answers(self) -> bool:
        right, wrong = self.result.right, self.result.wrong
        return right is not None and wrong is not None and right - wrong > 0.1 * max(abs(right), abs(wrong), 1e-6)

    def _is_paid(self, reward: float) -> bool:
        """Return whether a reward is about as high as a right answer's; False if right and wrong answers get the
        same."""
        right, wrong = self.result.right or 0.0, self.result.wrong or 0.0
        return self._separates_answers() and reward >= wrong + PAID * (right - wrong)


def _mean_score(rows: Sequence[Earned]) -> float:
    return mean(earned.reward for earned in rows)
