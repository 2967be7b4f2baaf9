"""Names and files of other libraries: torchforge, TorchStore, TRL, verl, OpenRLHF and TitanRL."""
