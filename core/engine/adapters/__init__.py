"""Targets that wrap other models: transformers models, frames of codes, guidance, trees as rows."""
