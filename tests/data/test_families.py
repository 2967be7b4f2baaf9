"""Conversations on the real tokenizers of the families of models; `make test-tokenizers` fetches them."""

import pytest

from scripts.tokenizer_checks.checks import CHECKS
from scripts.tokenizer_checks.families import FAMILIES, MISSING

pytestmark = [pytest.mark.costly, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_chat_template_of_each_model_family_masks_assistant_text(family, check):
    assert CHECKS[check](FAMILIES[family])
