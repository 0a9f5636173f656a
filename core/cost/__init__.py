"""Cost models: expected speedup, break-even points, simulation of other hardware."""
