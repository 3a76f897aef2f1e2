"""A model of the denoising step: what each kernel must move and compute, and how long a named
device needs for it. Knows no clock; see `docs/hardware.md`."""
