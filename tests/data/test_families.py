"""Conversations on the real tokenizers of the families of models; `make test-tokenizers` fetches them."""

from __future__ import annotations

import pytest

from tests.data.families import FAMILIES, MISSING
from tests.data.family_checks import CHECKS

pytestmark = [pytest.mark.costly, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_model_family_templates_pass_masking_checks(family, check):
    assert CHECKS[check](FAMILIES[family])
