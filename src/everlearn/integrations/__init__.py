"""Everlearn in other people's tools; each needs its own package, an extra of the same name."""
