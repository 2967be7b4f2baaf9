"""A server of the Tinker protocol: `forge tinker --model MODEL`, for unchanged programs of its SDK and cookbook."""
