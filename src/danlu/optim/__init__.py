"""Floor 4: update rules and learning-rate schedules."""
