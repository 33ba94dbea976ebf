"""New checkpoints made from old ones: ``migrate`` to another format, ``salvage`` from a damaged
one.
"""
