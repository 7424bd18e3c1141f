"""What every Lockstep service shares: settings, errors, gRPC life cycle, logs, metrics, the step vocabulary."""
