"""What needs the numbers inside of tensors: numpy on raw bytes. Imported where it is used, as numpy takes 0.1 s."""
