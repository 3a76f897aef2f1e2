"""What a person sees in a terminal while canvases are denoised. Knows events, and no networks."""
