"""Forward scans: the state through a sequence, and the outputs or what the gradient reads."""
