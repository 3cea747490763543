"""Gradients of every chunk from the states at its ends."""
