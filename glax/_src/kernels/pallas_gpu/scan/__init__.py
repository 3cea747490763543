"""Scan sequences forward or backward: form the states, and outputs or what the gradient reads."""
