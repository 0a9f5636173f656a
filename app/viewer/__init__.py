"""The static trace viewer: one HTML page that replays traces without a server, a model or a network."""
