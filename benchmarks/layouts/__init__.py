"""What layouts over ranks cost, hold and compute: measured here, beside what the planner says."""
