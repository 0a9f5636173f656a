"""Third-party weights and data: the catalogue, download sources, and readers of their file formats."""
