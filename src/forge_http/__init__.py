"""HTTP of the extensions: who may call a server, and answers of bounded size."""
