"""Names, settings and files of other libraries: torchforge, TorchStore, TRL, verl, OpenRLHF and TitanRL.

`forge` finds them by entry points: modules (`aliases`), verbs of services (`verbs`), settings (`setting_names`).
"""
