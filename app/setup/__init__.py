"""Installation helpers that run before the package is installed; standard library only."""
