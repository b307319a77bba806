"""Floor 5: joins the parts into a run."""
