"""`forge.actors._torchstore_utils` of torchforge: the keys of weights in its store.

Versions of weights are in the store of the run under one key, and old ones are removed without a call: programs of
torchforge that list and delete the keys of a version find none.
"""


def get_param_prefix(policy_version: int) -> str:
    """Return the prefix of the keys of a version's parameters, which no key has."""
    return f"policy_ver_{policy_version:010d}"


def get_param_key(policy_version: int, name: str) -> str:
    """Return the key of a parameter."""
    return f"{get_param_prefix(policy_version)}.{name}"


def get_dcp_whole_state_dict_key(policy_version: int) -> str:
    """Return the key of a version as a whole."""
    return get_param_key(policy_version, "dcp_whole_state_dict")


def rdma_enabled() -> bool:
    """Return False: on one host weights are in shared memory, and between hosts there is nothing to set."""
    return False
