"""Modules and endpoints of Meta's torchforge that are not here are answered by what is."""

import importlib
from importlib.util import find_spec

import pytest

from forge.runtime.controller.handle import Endpoint, Handle
from forge_compat.aliases import ABSENT
from forge_compat.setting_names import ENDPOINTS


class Service(Handle):
    async def _dispatch(self, call):
        return None

    def _end_session(self, session):
        pass


@pytest.mark.parametrize("name", ABSENT)
def test_absent_torchforge_module_error_names_replacement(name: str):
    with pytest.raises(ModuleNotFoundError, match=r"torchforge that forge replaces by: .* \(docs/start/from_t"):
        importlib.import_module(name)


def test_named_replacements_of_absent_torchforge_modules_exist():
    for here in ABSENT.values():
        for word in here.replace(",", "").replace(";", "").split():
            module, _, attribute = word.rpartition(".")
            if word.startswith("forge"):
                assert find_spec(word) if attribute.islower() and find_spec(module or word) is None else True
                if module and attribute[:1].isupper():
                    assert hasattr(importlib.import_module(module), attribute), word


@pytest.mark.parametrize("name", ENDPOINTS)
def test_torchforge_endpoint_error_names_replacement(name: str):
    service = Service("policy", frozenset({"generate", "logprobs"}))
    with pytest.raises(AttributeError, match=f"torchforge's {name} is .* here"):
        getattr(service, name)
    with pytest.raises(AttributeError, match=f"an endpoint has no '{name}': torchforge's {name} is"):
        getattr(Endpoint(service, "generate"), name)
    with pytest.raises(AttributeError, match="the verbs are route, fanout, call and call_one"):
        _ = service.generate.rout
