"""Reports: views of results."""
