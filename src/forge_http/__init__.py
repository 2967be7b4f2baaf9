"""HTTP for the other packages: servers that check who may call them, and clients that bound the size of answers."""
