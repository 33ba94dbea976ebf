"""The tensors of a checkpoint of any format: found, read in blocks, laid out in new files.

``opening`` turns a path into ``stored`` tensors, each with the layout of its bytes; each format
that can be opened has its module. ``hashing`` reads and digests them, ``new_files``,
``new_torch_files`` and ``new_dcp`` lay them out in new files. ``numbers`` and ``scanning`` look at
values (with numpy). Nothing here imports torch, and nothing is unpickled.
"""
