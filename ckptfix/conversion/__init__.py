"""``migrate`` and ``salvage``: a new checkpoint out of an old one, written next to its place and moved there."""
