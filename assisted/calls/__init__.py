"""What a call of `generate` asks for, whether drafts can be verified in it, and what it then runs."""
