"""`outrider bench`: one command a file, and how its results are drawn."""
