"""Access: keys, their limits, TLS, and which requests are admitted."""
