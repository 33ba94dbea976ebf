"""``seal``, ``verify`` and ``diff``: digests of every file and tensor, and two checkpoints
compared.
"""
