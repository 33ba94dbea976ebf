"""The nouns: what a checkpoint folder is, Accelerate's file names, tensor names, the scan."""
