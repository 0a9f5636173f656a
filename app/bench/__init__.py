"""The `outrider bench` commands, and the tables and plots of their results."""
