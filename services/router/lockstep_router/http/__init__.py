"""The REST front: OpenAI's interface and the operator's pages."""
