"""Matrix products of quantised weights; each subfolder is a format."""
