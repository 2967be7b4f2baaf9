"""TorchTitan as the backend of a trainer: `trainer.backend: titan`."""
