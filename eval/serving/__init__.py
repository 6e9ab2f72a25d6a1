"""What reuse gains in time."""
