"""Bytes to typed values and back, one module a format. Parsers take a reader or bytes, never a
path.
"""
