"""Decides every step of an engine group: queues, KV blocks, the vote, the ledger."""
