"""The mathematics of denoising: schedules, samplers, stopping rules, the canvas and the loop.

Knows no text beyond a function that decodes ids, no HTTP and no threads.
"""
