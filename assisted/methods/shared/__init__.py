"""What several methods need. Nothing here names a method."""
