"""Form what a chunk of the delta rule needs in addition to its state: inverses, scores and decayed operands."""
