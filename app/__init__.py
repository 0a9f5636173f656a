"""What people meet: the command line and what it needs to set itself up. Knows nothing of how methods work."""
