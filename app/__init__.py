"""What people meet: the command line and what it needs to set itself up. Independent of how methods work."""
