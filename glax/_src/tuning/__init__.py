"""Choose, measure, store and show the config that a kernel runs with."""
