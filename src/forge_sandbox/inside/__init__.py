"""What runs in the sandbox's own processes. They are told the text of these files, and import nothing else of forge."""
