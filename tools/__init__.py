"""What this project's makers run in a clone; nothing of it is installed."""
