"""Every number of a run: the typed recipe schema and the YAML files that fill it."""
