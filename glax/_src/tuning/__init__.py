"""Which config a kernel runs with: chosen, measured, remembered, shown."""
