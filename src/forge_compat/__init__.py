"""Names of Meta's torchforge and of TorchStore for what is here, so that programs of theirs run.

`forge` finds them by entry points: modules (`aliases`), and verbs of services (`verbs`).
"""
