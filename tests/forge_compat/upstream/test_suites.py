"""Upstream's test files against this library: what is stated as a difference fails, all else passes."""

import pytest

from .run import obstacle, outcomes
from .suites import SUITES, Suite

pytestmark = [pytest.mark.processes, pytest.mark.full]
FILES = [(suite, file) for suite in SUITES for file in suite.files]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("suite", "file"), FILES, ids=[f"{suite.name}-{file}" for suite, file in FILES])
def test_upstream_torchforge_tests_pass_except_known_failures(suite: Suite, file: str):
    if reason := obstacle(suite):
        pytest.skip(reason)
    results = list(outcomes(suite, file))
    assert any(outcome.status == "passed" for outcome in results) or suite.reason(f"{file}::"), results
    unexpected = [outcome for outcome in results if outcome.status == "failed" and suite.reason(outcome.name) is None]
    assert not unexpected
