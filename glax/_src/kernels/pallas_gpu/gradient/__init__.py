"""Compute the gradients of every chunk from the state before it and dL/dS behind it."""
