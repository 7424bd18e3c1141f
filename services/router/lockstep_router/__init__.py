"""The front of Lockstep: OpenAI-compatible REST and gRPC in, one session per scheduler out."""
