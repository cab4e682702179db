"""What the lecture predicts: memory, traffic, time, a schedule on a clock, which layout."""
