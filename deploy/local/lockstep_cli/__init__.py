"""The lockstep command: up, chat, model."""
