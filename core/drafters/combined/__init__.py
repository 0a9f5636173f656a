"""Drafters made of other drafters: ensembles, bandits, break-even guards, one drafter per row."""
