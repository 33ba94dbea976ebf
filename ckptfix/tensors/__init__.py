"""The tensors of any checkpoint, whatever its format: found, read in blocks, laid out in new files.

``opening`` turns a path into ``stored`` tensors, each with one of the ``layouts`` that say where its bytes are; each
format that can be opened has its module. ``digests`` names bytes. ``files`` lays tensors out in new files.
``elements`` alone looks at the numbers (with numpy). Nothing here imports torch, and nothing is unpickled.
"""
