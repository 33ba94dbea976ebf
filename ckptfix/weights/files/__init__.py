"""New files: what has to be written, byte by byte, before anything is written.

One module for each format returns ``parts.OutputFile`` values: literal bytes, and places where a tensor's bytes go.
Whoever writes them reads and converts the tensors; nothing here knows where those come from.
"""
