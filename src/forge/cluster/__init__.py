"""Several machines: the daemon on each of them, the pool that the controller takes them from, and what starts both."""
