"""The denoising step of a batch: its state, its tensor functions, and the host's side of it."""

from __future__ import annotations

from sfumato.diffusion.step.denoiser import Denoiser

__all__ = ["Denoiser"]
