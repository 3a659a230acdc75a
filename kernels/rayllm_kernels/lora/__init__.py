"""Low-rank adapters: of which a batch may have several, each token its own."""
