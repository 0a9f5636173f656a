"""Drawings of traces: SVG charts, token markup, image grids, waveforms, terminal output. Knows no model."""
