"""Measures Lockstep: the cost of the networked scheduler, the worker alone, the whole stack, peers."""
