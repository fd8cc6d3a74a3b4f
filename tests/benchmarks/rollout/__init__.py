"""What the rollout benchmark and the fault tests play: a task, an endpoint that knows how it is played, and clients."""
