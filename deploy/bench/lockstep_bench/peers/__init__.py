"""Measurements of other engines. Each module is a script for the peer's own interpreter and prints one JSON object;
nothing of Lockstep is imported there."""
