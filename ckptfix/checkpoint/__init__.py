"""Checkpoint folders: Accelerate's file names, keys of tensors, entries, the manifest, and the
scan.
"""
