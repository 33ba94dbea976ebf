"""The verbs, free of torch: diagnose, plan, apply, undo."""
