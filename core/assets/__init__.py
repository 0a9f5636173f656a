"""Third-party weights and data: the catalogue, where each is fetched from, and the readers of their formats."""
