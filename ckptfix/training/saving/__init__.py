"""Saves that are complete or absent: ``save_state`` stands in front of the Accelerator's own ``save_state``."""
