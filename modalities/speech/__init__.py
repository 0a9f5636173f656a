"""Speech as tokens in time."""
