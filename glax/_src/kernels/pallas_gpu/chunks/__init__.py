"""What a chunk of the delta rule needs beside its state."""
