"""Drawings of traces: SVG charts, token markup, image grids, waveforms, terminal output. Independent of models."""
