"""Training: the data, objective and recipe behind the embedded demonstration model."""
