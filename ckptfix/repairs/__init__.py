"""``repair`` and ``undo``: plan, show, journal, act, prove, commit, and the way back."""
