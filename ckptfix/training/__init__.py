"""All that imports torch or accelerate: the guarded Accelerator, whole saves, tolerant restore."""
