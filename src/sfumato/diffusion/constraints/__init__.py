"""What the tokens of a canvas must satisfy together: pinned templates, and what is read in them."""
