"""The code, YAML and commands of the torchforge documents, read from the documents and run as printed."""
