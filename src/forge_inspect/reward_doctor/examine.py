"""The examination: probes of several rows, what they earn, and what that says."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

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


@dataclass
class Examination:
    """What was seen of a reward.

    Args:
        right, wrong: mean rewards of right answers, in the form that earns most, and of other rows' answers.
        median_seconds, slowest: of calls that answered.
    """

    name: str
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


def examine(
    name: str, cases: Sequence[Case], *, limit: float = 10.0, report: Callable[[str], None] = lambda _: None
) -> Examination:
    """Examine a reward on rows of data.

    Args:
        name: `package.module:name`, or one of this library's rewards.
        cases: rows of the data it is for; the first `ROWS` are used, and need targets for most of what is tried.
        limit: seconds of a call.
        report: gets a line of progress now and then.

    Raises:
        ValueError: there are fewer than two rows, or the reward cannot be called with them at all.
    """
    if len(cases) < 2:
        raise ValueError(f"an examination needs two rows or more, got {len(cases)}")
    with RewardProcess(name, limit) as process:
        return _Examiner(name, cases[:ROWS], process, report).run()


class _Examiner:
    def __init__(self, name: str, cases: Sequence[Case], process: RewardProcess, report: Callable[[str], None]) -> None:
        self.cases, self.process, self.report = cases, process, report
        self.result = Examination(name, len(cases))
        self.seconds: list[float] = []
        self.errors: dict[str, Finding] = {}  # one of each kind of error
        self.targets = [case.target for case in cases if case.target]
        self.wrong: list[list[float]] = []  # rewards of wrong answers, by row
        self.best_form: list[tuple[str, float]] = []  # the form of the right answer that earns most, by row

    def run(self) -> Examination:
        first = self.process.call(self.cases[0], [self.cases[0].target or "1"])
        if first.error:
            raise ValueError(f"the reward cannot be called with the first row: {first.error}")
        # First what right and wrong answers earn: all others are compared with these. Last what may end the process.
        for step in (
            self.answers,
            self.forms,
            self.constants,
            self.hedges,
            self.copies,
            self.digits,
            self.injections,
            self.targets_that_are_missing,
            self.repeats,
            self.orders,
            self.hostile,
        ):
            self.report(step.__name__.replace("_", " "))
            step()
        result = self.result
        result.findings += self.errors.values()
        if self.seconds:
            result.median_seconds, result.slowest = median(self.seconds), max(self.seconds)
            if result.median_seconds > SLOW:
                self.add("note", "slow", f"a call takes {result.median_seconds:.2f} s", self.cases[0], ("1",))
        order = {"fault": 0, "doubt": 1, "note": 2}
        result.findings.sort(key=lambda finding: order[finding.severity])
        return result

    def score(self, case: Case, responses: Sequence[str], probe: str, target: str | None = None) -> Outcome:
        """Call the reward; an error is a finding, one of each kind."""
        outcome = self.process.call(case, responses, target)
        self.result.calls += 1
        if outcome.error:
            # One of each exception: hostile answers tend to raise the same.
            kind = outcome.error.split(":")[0]
            text = f"raises on {probe}: {outcome.error}"
            severity: Severity = "fault"
            name = "raises"
            if outcome.error.startswith("no answer within"):
                text, name = f"hangs on {probe}: {outcome.error}", "hangs"
            elif outcome.error.startswith("its process ended"):
                text, name = f"ends its process on {probe}: {outcome.error}", "ends"
            self.errors.setdefault(kind, Finding(severity, name, text, case, tuple(responses), target))
        else:
            self.seconds.append(outcome.seconds)
        return outcome

    def add(
        self,
        severity: Severity,
        kind: str,
        text: str,
        case: Case,
        responses: Sequence[str],
        expected: str = "",
        target: str | None = None,
    ) -> None:
        """Add a finding."""
        self.result.findings.append(Finding(severity, kind, text, case, tuple(responses), target, expected))

    # What right and wrong answers earn is what all others are compared with.

    def answers(self) -> None:
        rights = []
        for case in self.cases:
            earned = self._rewards(case, probes.right_forms(case.target)) if case.target else {}
            if earned:
                form = max(earned, key=lambda name: earned[name])
                self.best_form.append((form, earned[form]))
                rights.append(earned[form])
            # Wrong answers are plausible ones, in the form in which a right one would be paid.
            others = [target for target in dict.fromkeys(self.targets) if target != case.target]
            draw = random.Random(case.prompt)
            chosen = draw.sample(others, min(WRONG, len(others)))
            form = self.best_form[-1][0] if self.best_form else "plain"
            answers = {other: probes.right_forms(other)[form] for other in chosen}
            self.wrong.append(list(self._rewards(case, answers).values()))
        everything_wrong = [reward for rewards in self.wrong for reward in rewards]
        self.result.right = mean(rights) if rights else None
        self.result.wrong = mean(everything_wrong) if everything_wrong else None
        if self.result.right is not None and self.result.wrong is not None and not self._separates():
            self.add(
                "fault" if self.result.right < self.result.wrong else "doubt",
                "blind",
                f"right answers earn {self.result.right:.3f} on average and answers of other rows "
                f"{self.result.wrong:.3f}: it does not tell them apart, or expects a form that was not tried",
                self.cases[0],
                (self.cases[0].target or "",),
            )

    def forms(self) -> None:
        """Forms of the right answer that earn nothing."""
        if not self._separates():
            return
        for form in probes.right_forms("1"):
            missed = []
            for case in self._with_targets():
                outcome = self.score(case, [probes.right_forms(case.target or "")[form]], f"a right answer ({form})")
                if outcome.reward is not None and not self._is_paid(outcome.reward):
                    missed.append((case, outcome.reward))
            # In a few rows the form may change what the answer is.
            if len(missed) > len(self.cases) / 2:
                case, reward = missed[0]
                answer = probes.right_forms(case.target or "")[form]
                text = f"a right answer in the form {form!r} earns {reward:.3f}: {answer[-60:]!r}"
                self.add("note", "form", text, case, (answer,), f"rewards[0] > {reward}")

    def constants(self) -> None:
        """Answers that are the same whatever is asked."""
        typical = self._typical_wrong()
        for constant in probes.CONSTANTS:
            earned = []
            for case in self.cases:
                # The target of some row may be a constant by itself.
                if case.target is not None and constant.strip() and case.target in constant:
                    continue
                outcome = self.score(case, [constant], f"the answer {constant!r}")
                if outcome.reward is not None:
                    earned.append((outcome.reward, case))
            if not earned:
                continue
            average = mean(reward for reward, _ in earned)
            reward, case = max(earned, key=lambda pair: pair[0])
            if self._separates() and self._is_paid(average):
                text = f"the constant answer {constant!r} earns {average:.3f} on average, as right ones do"
                self.add("fault", "constant", text, case, (constant,), f"rewards[0] < {reward}")
            elif average > typical + ABOVE * self._distance():
                text = f"the constant answer {constant!r} earns {average:.3f} on average, wrong answers {typical:.3f}"
                self.add("doubt", "constant", text, case, (constant,), f"rewards[0] < {reward}")

    def hedges(self) -> None:
        """Answers that hold the right one without giving it."""
        self._compare(
            lambda case: probes.hedges(case, self._others(case)), "hedge", "doubt", "earns what a right one does"
        )

    def copies(self) -> None:
        """The prompt itself, and answers that quote it."""

        def copied(case: Case) -> dict[str, str]:
            # A prompt may hold its answer, as in a multiple choice.
            return {"the prompt": case.prompt, "the prompt twice": f"{case.prompt}\n{case.prompt}"}

        self._compare(copied, "copy", "doubt", "earns what a right answer does")

    def digits(self) -> None:
        """The right number in digits of another script."""
        if not self._separates():
            return
        for name, table in (("Arabic", probes.ARABIC), ("full-width", probes.WIDE)):
            for case in self._with_targets():
                form = self.best_form[0][0]
                answer = probes.right_forms((case.target or "").translate(table))[form]
                if answer == probes.right_forms(case.target or "")[form]:
                    continue
                reward = self.score(case, [answer], f"{name} digits").reward
                if reward is not None:
                    verdict = "right" if self._is_paid(reward) else "wrong"
                    text = f"the right number in {name} digits counts as {verdict} ({reward:.3f})"
                    self.add("note", "digits", text, case, (answer,), f"rewards[0] != {reward}")
                    break

    def injections(self) -> None:
        """Wrong answers with instructions."""
        self._compare(
            lambda case: probes.injections(self._others(case)),
            "injection",
            "fault",
            "earns what a right one does, though the answer is wrong",
        )

    def targets_that_are_missing(self) -> None:
        """Rows without a target: nothing is known, and a number says otherwise."""
        case = self.cases[0]
        if not case.target:
            return
        for name, response in (("an answer", "12"), ("an empty answer", "")):
            outcome = self.process.call(case, [response], "")
            self.result.calls += 1
            if outcome.reward is not None:
                paid = self._separates() and self._is_paid(outcome.reward)
                text = f"{name} to a row with an empty target earns {outcome.reward:.3f}, and not None (unscored)"
                self.add(
                    "fault" if paid else "doubt", "target", text, case, (response,), "rewards[0] is None", target=""
                )

    def repeats(self) -> None:
        """The same call again."""
        for case in self.cases[:4]:
            # Three calls: a reward that samples or counts differs in nearly all of them.
            answers = list(probes.right_forms(case.target or "1").values())[:3]
            outcomes = [self.score(case, answers, "the same answers again") for _ in range(3)]
            values = {outcome.rewards for outcome in outcomes if not outcome.error}
            if len(values) > 1:
                text = f"the same answers earn different rewards: {', '.join(map(str, sorted(map(str, values))))}"
                self.add("doubt", "random", text, case, answers)
                return

    def orders(self) -> None:
        """A group in other orders, and its members alone."""
        case = self.cases[0]
        group = list(dict.fromkeys([*probes.right_forms(case.target or "1").values(), *self._others(case)[:3]]))
        plain = self.score(case, group, "a group").rewards
        if not plain:
            return
        draw = random.Random(0)
        for _ in range(ORDERS):
            order = draw.sample(range(len(group)), len(group))
            moved = self.score(case, [group[number] for number in order], "a group in another order").rewards
            if moved and moved != tuple(plain[number] for number in order):
                text = "rewards of a group depend on the order of its answers"
                self.add("fault", "order", text, case, [group[number] for number in order])
                return
        # That a reward compares the answers of a group may be meant.
        alone = tuple(self.score(case, [answer], "one answer").reward for answer in group)
        if alone != plain:
            self.add("note", "group", "answers earn something else in a group than alone", case, group)

    def hostile(self) -> None:
        """Answers that take long or confuse parsers: errors and time-outs are found by `score`."""
        for case in self.cases[:2]:
            for name, answer in probes.hostile(case).items():
                outcome = self.score(case, [answer], name)
                if outcome.reward is not None and self._separates() and self._is_paid(outcome.reward):
                    if case.target and case.target in answer:
                        continue
                    text = f"{name} earns {outcome.reward:.3f}, as right answers do"
                    self.add("fault", "hostile", text, case, (answer,), f"rewards[0] < {outcome.reward}")

    def _compare(self, answers: Callable[[Case], dict[str, str]], kind: str, severity: Severity, verdict: str) -> None:
        """Add a finding for each kind of answer that most rows pay as right."""
        if not self._separates():
            return
        paid: dict[str, list[tuple[Case, str, float]]] = {}
        counts: dict[str, int] = {}
        for case in self._with_targets():
            if not self._others(case):
                continue
            for name, answer in answers(case).items():
                outcome = self.score(case, [answer], name)
                if outcome.reward is None:
                    continue
                counts[name] = counts.get(name, 0) + 1
                if self._is_paid(outcome.reward):
                    paid.setdefault(name, []).append((case, answer, outcome.reward))
        for name, rows in paid.items():
            # One row may be right by accident.
            if len(rows) > max(1, counts[name] / 4):
                case, answer, reward = rows[0]
                text = f"{name} {verdict} in {len(rows)} of {counts[name]} rows: {answer[:80]!r}"
                self.add(severity, kind, text, case, (answer,), f"rewards[0] < {reward}")

    def _rewards(self, case: Case, answers: dict[str, str]) -> dict[str, float]:
        earned = {}
        for name, answer in answers.items():
            reward = self.score(case, [answer], f"an answer ({name})").reward
            if reward is not None:
                earned[name] = reward
        return earned

    def _with_targets(self) -> Iterator[Case]:
        return (case for case in self.cases if case.target)

    def _others(self, case: Case) -> list[str]:
        return [target for target in dict.fromkeys(self.targets) if target != case.target][:6]

    def _distance(self) -> float:
        if self.result.right is None or self.result.wrong is None:
            return 1.0
        return max(self.result.right - self.result.wrong, 0.0) or 1.0

    def _separates(self) -> bool:
        right, wrong = self.result.right, self.result.wrong
        return right is not None and wrong is not None and right - wrong > 0.1 * max(abs(right), abs(wrong), 1e-6)

    def _is_paid(self, reward: float) -> bool:
        assert self.result.right is not None and self.result.wrong is not None
        return reward >= self.result.wrong + PAID * (self.result.right - self.result.wrong)

    def _typical_wrong(self) -> float:
        # The median: partial credit for a few lucky ones must not hide what most earn.
        rewards = [reward for row in self.wrong for reward in row]
        return median(rewards) if rewards else 0.0
