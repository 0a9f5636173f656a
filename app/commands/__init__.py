"""The other commands of `outrider`, one a file."""
