"""Everything that is not a call of `generate`: measuring, planning, auditing, handing over, training."""
